"""Files of sound whose time stamps have holes and overlaps."""

from __future__ import annotations

from fractions import Fraction

import av
import numpy as np

RATE = 8000


def stamped(path, blocks, kind="matroska", codec="pcm_s16le", picture=None) -> None:
    """A file of sound in blocks (second at which it is stamped, seconds, level), and where named a video whose first
    picture is at the second `picture`."""
    with av.open(str(path), "w", format=kind) as file:
        packets = []
        if picture is not None:
            video = file.add_stream("libx264", rate=10)
            video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
            for n in range(10):
                frame = av.VideoFrame(64, 48, "yuv420p")
                frame.pts, frame.time_base = n, Fraction(1, 10)
                packets += [(p, picture) for p in video.encode(frame)]
            packets += [(p, picture) for p in video.encode(None)]
        sound, at = file.add_stream(codec, rate=RATE, layout="mono"), 0
        for second, lasts, level in blocks:
            count = round(lasts * RATE)
            plane = np.full((1, count), level * 32767)
            planar = sound.codec_context.format.name == "fltp"
            plane = (plane / 32767).astype(np.float32) if planar else plane.astype(np.int16)
            frame = av.AudioFrame.from_ndarray(plane, format="fltp" if planar else "s16", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = RATE, at, Fraction(1, RATE)
            packets += [(p, second - Fraction(at, RATE)) for p in sound.encode(frame)]
            at += count
        packets += [(p, second - Fraction(at - count, RATE)) for p in sound.encode(None)]
        for packet, late in packets:
            packet.pts += round(late / packet.time_base)
            packet.dts += round(late / packet.time_base)
        for packet, _ in sorted(packets, key=lambda entry: entry[0].dts * entry[0].time_base):
            file.mux(packet)


def levels(sound, rate, seconds) -> list[float]:
    """The loudest samples around these seconds, rounded."""
    return [round(sound[0, round((s - 0.01) * rate) : round((s + 0.01) * rate)].abs().max().item(), 1) for s in seconds]


#: Blocks, and the levels just before and after the edges that time stamps give.
STAMPED = {
    "hole": ([(0, 0.5, 0.2), (1, 0.5, 0.6)], {0.45: 0.2, 0.55: 0, 0.95: 0, 1.05: 0.6, 1.45: 0.6}),
    "two holes": ([(0, 0.3, 0.2), (0.5, 0.3, 0.4), (1.5, 0.3, 0.6)], {0.25: 0.2, 0.4: 0, 0.6: 0.4, 1.4: 0, 1.6: 0.6}),
    "many small holes": ([(n * 0.12, 0.1, 0.2) for n in range(10)] + [(1.2, 0.3, 0.6)], {1.17: 0.2, 1.22: 0.6}),
    "overlap": ([(0, 1, 0.2), (0.8, 0.5, 0.4), (1.3, 0.3, 0.6)], {0.95: 0.2, 1.05: 0.4, 1.25: 0.4, 1.35: 0.6}),
    "late": ([(0.7, 0.5, 0.6)], {0.1: 0, 0.65: 0, 0.75: 0.6}),
}
