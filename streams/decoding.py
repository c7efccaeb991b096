"""Raw payloads to the columns of their contract, by its format.

What becomes of a row depends on its bytes and the contract alone, never on the rows that share its batch; of a framed
one on what the schema registry knows by the id before it, too.
"""

from schemas.contract import Contract
from streams.batch import RawBatch
from streams.decoded import DecodedBatch
from streams.json_decoding import decode_json


def decode(batch: RawBatch, contract: Contract) -> DecodedBatch:
    """Decode and validate one raw batch.

    Raises:
        ConfigError: Payloads are framed, and no schema registry has been named.
        RegistryUnavailableError: The schema registry does not answer; may be tried again.
    """
    if contract.wire is None and not contract.is_framed:
        return decode_json(batch, contract)
    # The libraries of a format are loaded where it is used.
    from streams.record_decoding import decode_framed_json, decode_records  # noqa: PLC0415

    return decode_framed_json(batch, contract) if contract.wire is None else decode_records(batch, contract)
