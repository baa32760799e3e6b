"""The sections of a configuration file, one module for each concern."""

from outrider_cluster.sections.base import AutoscalingSettings, CudaSettings, KvSettings, Section
from outrider_cluster.sections.draft import SELF_DRAFT, DraftSettings
from outrider_cluster.sections.engine import EmulatedSettings, EngineKind, ModelSettings, ScriptedSettings
from outrider_cluster.sections.platform import RaySettings, TelemetrySettings
from outrider_cluster.sections.security import SecuritySettings, TlsSettings
from outrider_cluster.sections.serving import DataPlaneSettings, HttpSettings, PortSettings, RouterSettings
from outrider_cluster.sections.speculation import NgramSettings, SpeculationSettings
from outrider_cluster.sections.target import TargetSettings

__all__ = [
    "SELF_DRAFT",
    "AutoscalingSettings",
    "CudaSettings",
    "DataPlaneSettings",
    "DraftSettings",
    "EmulatedSettings",
    "EngineKind",
    "HttpSettings",
    "KvSettings",
    "ModelSettings",
    "NgramSettings",
    "PortSettings",
    "RaySettings",
    "RouterSettings",
    "ScriptedSettings",
    "Section",
    "SecuritySettings",
    "SpeculationSettings",
    "TargetSettings",
    "TelemetrySettings",
    "TlsSettings",
]
