"""Every transcript holds: in the engine, whole and row by row with a restart before each row, and in a file.

On the live path: ``tests/integration/test_live_transcripts.py``.

Those that must fail do. A file has no processing time and no headers, JSON no NaN, and ``headrace compute`` does not
tell the watermark: what hangs on these is seen in the engine alone.
"""

from pathlib import Path

import pytest

from tests.support.transcript import ComputeExecutor, EngineExecutor, Transcript, TranscriptError, load_transcripts

HERE = Path(__file__).parent
TRANSCRIPTS = list(load_transcripts(HERE / "transcripts"))
MUST_FAIL = list(load_transcripts(HERE / "must_fail"))
IN_A_FILE = [t for t in TRANSCRIPTS if t.fits_a_file]
MUST_FAIL_IN_A_FILE = [t for t in MUST_FAIL if t.fits_a_file and not t.has_step_with("watermark")]


@pytest.mark.parametrize("is_singly", [False, True], ids=["whole", "singly"])
@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda t: t.name)
def test_it_holds(transcript: Transcript, is_singly: bool) -> None:
    transcript.run(EngineExecutor(transcript.view, is_singly=is_singly))


@pytest.mark.parametrize("transcript", MUST_FAIL, ids=lambda t: t.name)
def test_a_wrong_transcript_is_told_apart(transcript: Transcript) -> None:
    with pytest.raises(TranscriptError):
        transcript.run(EngineExecutor(transcript.view, is_singly=False))


@pytest.mark.parametrize("transcript", IN_A_FILE, ids=lambda t: t.name)
def test_it_holds_in_a_file(transcript: Transcript, tmp_path: Path) -> None:
    transcript.run(ComputeExecutor(transcript, tmp_path))


@pytest.mark.parametrize("transcript", MUST_FAIL_IN_A_FILE, ids=lambda t: t.name)
def test_a_wrong_transcript_is_told_apart_in_a_file(transcript: Transcript, tmp_path: Path) -> None:
    with pytest.raises(TranscriptError):
        transcript.run(ComputeExecutor(transcript, tmp_path))


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) > 30
    assert len(IN_A_FILE) > 30
    assert len(MUST_FAIL_IN_A_FILE) > 5
