"""Where batches come from: arrays on the device, or any loader."""

from trainer.data._chunk import (
    Chunk as Chunk,
    does_not_fit as does_not_fit,
    Layout as Layout,
)
from trainer.data._source import (
    AbstractSource as AbstractSource,
    Feed as Feed,
    OtherForm as OtherForm,
    Wanted as Wanted,
)
from trainer.data.arrays import Arrays as Arrays
from trainer.data.loaders import as_source as as_source, Loader as Loader
from trainer.data.sampler import (
    AbstractSampler as AbstractSampler,
    Sampled as Sampled,
)
