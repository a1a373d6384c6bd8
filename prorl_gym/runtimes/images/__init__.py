"""Images of sandboxes: built from definitions that task families bring, or fetched; each made once and kept."""

from prorl_gym.runtimes.images.builder import Obtained, RuntimeImageBuilder
from prorl_gym.runtimes.images.store import ImageStore, StoredImage

__all__ = ["ImageStore", "Obtained", "RuntimeImageBuilder", "StoredImage"]
