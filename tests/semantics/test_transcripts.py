"""Every transcript holds, whole and row by row with a restart before each row; those that must fail do."""

from pathlib import Path

import pytest

from tests.support.transcript import EngineExecutor, Transcript, TranscriptError, load_transcripts

HERE = Path(__file__).parent
TRANSCRIPTS = list(load_transcripts(HERE / "transcripts"))
MUST_FAIL = list(load_transcripts(HERE / "must_fail"))


@pytest.mark.parametrize("is_singly", [False, True], ids=["whole", "singly"])
@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda t: t.name)
def test_it_holds(transcript: Transcript, is_singly: bool) -> None:
    transcript.run(EngineExecutor(transcript.view, is_singly=is_singly))


@pytest.mark.parametrize("transcript", MUST_FAIL, ids=lambda t: t.name)
def test_a_wrong_transcript_is_told_apart(transcript: Transcript) -> None:
    with pytest.raises(TranscriptError):
        transcript.run(EngineExecutor(transcript.view, is_singly=False))


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) > 30
    assert len(MUST_FAIL) > 5
