"""Opens the backend that a configuration asks for: weights, pool, and the name of what computes."""

import logging
from dataclasses import dataclass, replace

import torch

from kakeya import kernels as native
from kakeya.config import EngineConfig
from kakeya.engine.backend import Backend
from kakeya.engine.cpu.backend import CpuBackend, cpu_pool
from kakeya.engine.cuda.backend import CudaBackend
from kakeya.engine.cuda.memory import device_memory, weight_elements
from kakeya.engine.cuda.weights import load_weights
from kakeya.engine.device import CPU, free_memory
from kakeya.engine.shared_prefixes import GRANULE
from kakeya.engine.slab import SlabPool, prefix_cache_bytes, slab_geometry, undo_bytes
from kakeya.errors import ConfigError
from kakeya.kernels.gpu import GpuKernels, load_gpu_kernels
from kakeya.kernels.gpu.torch_kernels import TorchKernels
from kakeya.models.blocks import BlockFormat
from kakeya.models.checkpoint import Checkpoint
from kakeya.models.config import ModelConfig
from kakeya.models.drafter import DrafterConfig, StoredDrafter
from kakeya.models.fitting import BYTES_PER_PARAMETER, PACKED_OVER_FILE
from kakeya.models.float_types import FLOAT_TYPES
from kakeya.models.loader import load_decoder
from kakeya.models.quantized import INTEGER_BITS
from kakeya.types import BackendChoice, DType, WeightFormat

log = logging.getLogger(__name__)

CUDA = torch.device("cuda", 0)

_NOTHING_LEFT = 32 * 2**20  # bytes: the plan leaves hundreds of millions, for libraries and graphs


@dataclass(frozen=True)
class OpenedBackend:
    """A backend ready to run, and what there is to say about it."""

    backend: Backend
    parameters: int
    weights: str
    kernels: str


def chosen_backend(config: EngineConfig) -> EngineConfig:
    """The same with its backend chosen, and what depends on it. Raises ConfigError for an absent one."""
    has_cuda = torch.cuda.is_available()
    if config.backend is BackendChoice.AUTO:
        return replace(config, backend=BackendChoice.CUDA if has_cuda else BackendChoice.CPU)
    if config.backend is BackendChoice.CUDA and not has_cuda:
        raise ConfigError(
            f"there is no CUDA device that torch {torch.__version__} can use; choose --backend cpu"
        )
    if config.backend is BackendChoice.MLX:
        _check_mlx(config)
    return config


def _check_mlx(config: EngineConfig) -> None:
    try:
        from kakeya.engine.mlx.backend import check_mlx
    except ImportError as error:
        raise ConfigError(
            f"--backend mlx needs the package mlx ({error}); install it with: pip install 'kakeya[mlx]'"
        ) from error
    check_mlx(config.numerics)


def room_for_sessions(
    checkpoint: Checkpoint, config: EngineConfig, most: int, drafter: DrafterConfig | None = None
) -> int:
    """Bytes that a pool of up to `most` slabs may take beside the model. The backend must be chosen, and the
    `drafter` that a device runs by itself.

    Raises ConfigError when none are left.
    """
    model = checkpoint.config
    if config.backend is not BackendChoice.CUDA:
        return _room_beside_weights(checkpoint, config)
    free = _free_on_device()

    def room(sessions: int) -> int:
        return device_memory(model, replace(config, capacity=sessions), drafter=drafter).room(free)

    # Buffers grow with the sessions: plan them for no more sessions than would fit without buffers.
    draft_layers = drafter.layers if drafter is not None else 0
    fitting = room(1) // slab_geometry(model, config, draft_layers).slab_bytes
    return room(max(1, min(most, fitting)))


def _room_beside_weights(checkpoint: Checkpoint, config: EngineConfig) -> int:
    weights, free = held_bytes(checkpoint, config), free_memory(CPU)
    if weights >= free:
        raise ConfigError(
            f"the weights take {weights:,} bytes, and {free:,} are free: no room is left for sessions"
        )
    return free - weights


def held_bytes(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """The main memory for the weights: estimated from a quantized file's formats, or from every number.

    On MLX it is counted matrix by matrix, because some formats grow a lot there.
    """
    if config.backend is BackendChoice.MLX:
        from kakeya.engine.mlx.weights import mlx_weight_bytes

        return mlx_weight_bytes(checkpoint, dtype=config.dtype, weights=config.weights)
    if checkpoint.files and config.weights in (WeightFormat.AUTO, WeightFormat.NATIVE):
        native_kernels = native.load(config.kernels) is not None
        formats = checkpoint.matrix_elements.items()
        return int(sum(count * _bytes_each(name, config.dtype, native_kernels) for name, count in formats))
    bytes_each = BYTES_PER_PARAMETER.get(config.weights, FLOAT_TYPES[config.dtype].itemsize)
    return int(weight_elements(checkpoint.config) * bytes_each)


def _bytes_each(ggml_format: str, dtype: DType, native_kernels: bool) -> float:
    """What an element takes that a file has in that format, where its numbers are not asked to change."""
    form = BlockFormat.__members__.get(ggml_format)
    if form is not None and native_kernels:
        return form.nbytes / form.columns * PACKED_OVER_FILE
    if form in INTEGER_BITS:  # torch has matmuls for these
        return BYTES_PER_PARAMETER[WeightFormat.INT4 if INTEGER_BITS[form] == 4 else WeightFormat.INT8]
    return FLOAT_TYPES[dtype].itemsize  # expanded


def _free_on_device() -> int:
    try:
        return free_memory(CUDA)
    except RuntimeError as error:  # such as a device so full that it cannot even be asked
        raise ConfigError(
            f"the CUDA device cannot be used; nvidia-smi shows who else uses it: {error}"
        ) from error


def open_backend(
    checkpoint: Checkpoint,
    config: EngineConfig,
    observed_layers: int = 0,
    drafter: StoredDrafter | None = None,
) -> OpenedBackend:
    """Load `checkpoint` onto the chosen backend.

    `observed_layers`: how many layers' outputs a proposer is shown. They take memory on a device. A `drafter`
    runs on the device itself.
    Raises CorruptCheckpoint, and ConfigError for what the backend cannot do or has no memory for.
    """
    torch.set_num_threads(config.threads)
    if config.backend is BackendChoice.MLX:
        return _open_mlx(checkpoint, config)
    if config.backend is not BackendChoice.CUDA:
        return _open_cpu(checkpoint, config)
    try:
        return open_device(checkpoint, config, CUDA, observed_layers, drafter)
    except RuntimeError as error:
        if not _ran_out_of_memory(error):
            raise
        memory = device_memory(checkpoint.config, config, observed_layers)
        raise ConfigError(
            f"the device ran out of memory while the model was loaded, though the arithmetic left room: "
            f"{config.capacity:,} slabs beside {memory}; lower --memory-budget or --capacity: {error}"
        ) from error


def _ran_out_of_memory(error: BaseException) -> bool:
    # Torch's allocator, the driver that keeps graphs, and Triton all use these words.
    if "out of memory" in str(error):
        return True
    try:  # Other libraries say only that something failed.
        return free_memory(CUDA) < _NOTHING_LEFT
    except RuntimeError:  # a device that cannot even be asked has failed otherwise
        return False


def _open_cpu(checkpoint: Checkpoint, config: EngineConfig) -> OpenedBackend:
    kernels = native.load(config.kernels)
    if kernels is not None:
        kernels.set_threads(config.threads)
    decoder = load_decoder(
        checkpoint, dtype=config.dtype, weights=config.weights, numerics=config.numerics, kernels=kernels
    )
    described = decoder.describe_weights()
    backend = CpuBackend(
        decoder, cpu_pool(decoder, config), config.numerics, kernels, _fingerprint(checkpoint, described)
    )
    name = f"native ({kernels.isa})" if kernels is not None else "torch"
    return OpenedBackend(backend, decoder.num_parameters, described, name)


def _open_mlx(checkpoint: Checkpoint, config: EngineConfig) -> OpenedBackend:
    # Here, because the package that they need is an extra.
    from kakeya.engine.mlx.backend import MlxBackend, device_name, mlx_pool
    from kakeya.engine.mlx.weights import load_mlx_weights

    kernels = native.load(config.kernels)  # they choose tokens
    if kernels is not None:
        kernels.set_threads(config.threads)
    weights = load_mlx_weights(checkpoint, dtype=config.dtype, weights=config.weights)
    pool = mlx_pool(checkpoint.config, config)
    backend = MlxBackend(weights, pool, kernels, _fingerprint(checkpoint, weights.numbers))
    return OpenedBackend(backend, weights.num_parameters, weights.description, device_name())


def open_device(
    checkpoint: Checkpoint,
    config: EngineConfig,
    device: torch.device,
    observed_layers: int = 0,
    drafter: StoredDrafter | None = None,
) -> OpenedBackend:
    """The CUDA backend on `device`, which may be a CPU: nothing else differs."""
    if drafter is not None:
        drafter.config.check_fits(checkpoint.config)
    shape = drafter.config if drafter is not None else None
    geometry = slab_geometry(checkpoint.config, config, shape.layers if shape is not None else 0)
    memory = device_memory(checkpoint.config, config, observed_layers, shape)
    prefix_bytes = prefix_cache_bytes(config, geometry)
    undo = undo_bytes(config, geometry)
    memory.check(config.capacity, geometry.slab_bytes, prefix_bytes, free_memory(device), undo)
    kernels = _device_kernels(checkpoint.config, config, device)
    weights = load_weights(checkpoint, dtype=config.dtype, weights=config.weights, device=device)
    pool = SlabPool(geometry, config.capacity, device, GRANULE, prefix_bytes)
    fingerprint = _fingerprint(checkpoint, weights.description)
    backend = CudaBackend(weights, pool, config.numerics, kernels, fingerprint, config, device, drafter)
    backend.capture()
    name = f"{kernels.name} ({torch.cuda.get_device_name(device) if device.type == 'cuda' else device})"
    return OpenedBackend(backend, weights.num_parameters, weights.description, name)


def _device_kernels(model: ModelConfig, config: EngineConfig, device: torch.device) -> GpuKernels:
    kernels = load_gpu_kernels(device, config.kernels)
    if kernels.supports_head_dim(model.head_dim):
        return kernels
    log.warning(
        "the %s kernels do not take heads of %d; torch computes instead, slowly", kernels.name, model.head_dim
    )
    return TorchKernels()


def _fingerprint(checkpoint: Checkpoint, weights: str) -> str:
    """Slabs of the same model and numbers may move between backends."""
    return f"{checkpoint.fingerprint}/{weights}"
