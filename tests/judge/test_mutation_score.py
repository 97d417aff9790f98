"""Every written tensor, every config key and every rule mutated: who notices?"""

from __future__ import annotations
import sys, time
from pathlib import Path
