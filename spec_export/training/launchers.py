"""Who started this process: torchrun, ``accelerate launch``, MPI, or a person.

speculators takes part in a distributed training if torchrun's ``LOCAL_RANK`` is set.
``accelerate launch`` sets that too where it starts its processes itself, for GPUs or
under ``--use_fsdp``. By MPI it does not: each process would take itself for the only
one, and all would write to the same ``save_path``.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from spec_export.findings import Finding, usage_error, warning

# What MPICH and Intel MPI, Open MPI, MVAPICH say in the place of torchrun's names.
_MPI = (
    {"RANK": "PMI_RANK", "WORLD_SIZE": "PMI_SIZE", "LOCAL_RANK": "MPI_LOCALRANKID"},
    {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    },
    {
        "RANK": "MV2_COMM_WORLD_RANK",
        "WORLD_SIZE": "MV2_COMM_WORLD_SIZE",
        "LOCAL_RANK": "MV2_COMM_WORLD_LOCAL_RANK",
    },
)
_RANKS = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK"})
# Where processes meet; accelerate always says it to several.
_PLACE = frozenset({"MASTER_ADDR", "MASTER_PORT"})
# What accelerate wraps a model in, for those who ask it to; speculators does not.
_WRAPPERS = {
    "ACCELERATE_USE_FSDP": "--use_fsdp",
    "ACCELERATE_USE_DEEPSPEED": "--use_deepspeed",
    "ACCELERATE_USE_MEGATRON_LM": "--use_megatron_lm",
}


def join_launcher(environ: MutableMapping[str, str], sharded: bool) -> list[Finding]:
    """Say in torchrun's words who this process is; call it before a draft is loaded.

    Args:
        environ: Of the process; changed where others would misread it.
        sharded: Whether speculators was asked to shard the model.

    Returns:
        Warnings for what the launcher was asked for and speculators does not read.

    Raises:
        SpecExportError: exit 2 ``option-invalid`` if ``accelerate launch`` was asked
            for several processes and has started one.
    """
    told = []
    if "LOCAL_RANK" not in environ:
        ranks = _told_by_mpi(environ)
        if ranks and environ.keys() >= _PLACE:
            environ.update(ranks)
        elif ranks:  # a sweep, or what a container inherited, as well as a mistake
            told.append(
                warning(
                    "option-invalid",
                    "MPI",
                    f"it started {ranks['WORLD_SIZE']} processes, and nobody says "
                    "where they meet: this one trains alone",
                    "for one training start them by torchrun or accelerate launch, "
                    "or set MASTER_ADDR and MASTER_PORT",
                )
            )
        elif _is_alone(environ):
            raise usage_error(
                "option-invalid",
                "accelerate launch",
                "it was asked for several processes and has started one: without "
                "GPUs, and under --cpu, it starts more only by --mpirun_hostfile",
                "accelerate launch --multi_gpu, which serves CPUs too, or torchrun; "
                "for one process unset MASTER_ADDR",
            )
    if environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        # transformers would load a pretrained draft in the first process alone, for
        # accelerate to share out, which speculators does not ask it to.
        environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    return told + [
        warning(
            "option-invalid",
            f"accelerate {flag}",
            "speculators does not read it: its model is replicated in each process",
            "--fsdp-shard, which is speculators' own flag, shards the model",
        )
        for name, flag in _WRAPPERS.items()
        if not sharded and environ.get(name, "").lower() == "true"
    ]


def _told_by_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    """Rank, local rank and number of processes; empty unless there are several.

    All three from the same launcher: one may run inside another's job.
    """
    for names in _MPI:
        found = {
            name: environ[theirs]
            for name, theirs in names.items()
            if environ.get(theirs, "").isdecimal()
        }
        if found.keys() == names.keys() and int(found["WORLD_SIZE"]) > 1:
            return found
    return {}


def _is_alone(environ: Mapping[str, str]) -> bool:
    """Whether accelerate has told nobody but us where to meet."""
    said = {"ACCELERATE_USE_CPU", *_PLACE}
    return said <= environ.keys() and environ.keys().isdisjoint(_RANKS)
