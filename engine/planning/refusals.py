"""Messages of plans where nothing fits or an option is overruled: whole sentences, which the panel translates.

size: a frame in pixels, "1280x720"; needs, target and other memory as `in_gb` gives it; tile_px, overlap_px: in pixels.
option: the one that raises the target, vram_gb or, on a CPU, ram_gb. ways: further remedies, each of which may be
followed by more.
"""

SMALLEST = (
    "{size} needs {needs} even in the smallest tiles and the target is {target}: raise {option}, or use smaller frames"
)
SMALLEST_CLIP = f"{SMALLEST} or a shorter clip"
SMALLEST_OVERLAP = (
    "{size} needs {needs} even in the smallest tiles that share overlap={overlap_px} and the target is {target}: "
    "lower the overlap, or raise {option}"
)
TILE = "tile={tile_px} at {size} needs {needs} and the target is {target}: raise {option}"
TILE_SMALLER = (
    "tile={tile_px} at {size} needs {needs} and the target is {target}: use a smaller tile (0: automatic) or overlap, "
    "or raise {option}"
)
CHUNK = (
    "chunk={chunk} needs {needs} at {size} and the target is {target}: lower chunk ({fits} fits; 0 lets the planner "
    "choose)"
)
CHUNK_TOO = "chunk={chunk} needs {needs}: lower it too (0 lets the planner choose)"
NOISE = (
    "the noise of this clip takes {needs} of host memory and ram_gb allows {allowed}: raise ram_gb, or use a shorter "
    "clip"
)
OWN_TILES = (
    "{size} in its own tiles needs {needs} at least and the target is {target}: raise {option}, or use smaller frames"
)

WHOLE = "{size} untiled needs {needs} and the target is {target}: raise {option}, {ways}"
LEANER = "or use fp16 or bf16, which need less, {ways}"
MORE_OF_BOTH = "or vram_gb to {gpu} and ram_gb to {ram} (it is {allowed}), {ways}"
MORE_RAM = "or ram_gb to {ram} (it is {allowed}; {gpu} of GPU memory then do), {ways}"
TILED = "or use tiling='auto' or 'blended' (approximate; tile=0 picks the size)"
SMALLER = "or use smaller frames to have them exact"

APPROXIMATE = "blended tiles are approximate"
RAISED = "the target of {target} is raised to the {room} that are free: {why}"
BESIDE = "{left} (other models and data of this program hold {held})"
NOTHING_SMALLER = "nothing smaller fits"
FOR_WHOLE = "whole frames need it"
FOR_OWN_TILES = "it needs them"
CHUNK_UNUSED = "chunk={chunk} does not fit the target and is not used: same frames"
NOT_ALL_STAY = "not all models can stay on the card: exact frames need {out} of them to leave at least"
TILES_MOVE = "not all models can stay on the card: blended tiles are planned as on an empty one"
