//! Request headers and status frames of the data connection.
//!
//! # Source
//! The project's protocol page on the Mooncake wire, section 7. All integers are little-endian.

/// Bytes of a request header: size, address, operation byte, seven bytes of padding.
pub const HEADER_LEN: usize = 24;

/// Bytes of a status frame.
pub const STATUS_LEN: usize = 8;

/// High half of a status frame.
const STATUS_MAGIC: u32 = 0x4D43_5456;

/// The flag in the operation byte that asks for a status frame.
const VERSION_2_FLAG: u8 = 0x80;

/// Which way a transfer moves bytes, seen from the initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(
    clippy::exhaustive_enums,
    reason = "one moves bytes one way or the other"
)]
pub enum Op {
    /// From the target's memory into the initiator's.
    Read,
    /// From the initiator's memory into the target's.
    Write,
}

/// Version of the data protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum DataVersion {
    /// Writes are not acknowledged, reads have no status.
    V1,
    /// Every request is answered with a status frame.
    V2,
}

/// One request as it stands at the start of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "the layout is fixed")]
pub struct Header {
    /// Payload bytes.
    pub size: u64,
    /// First byte in the target's memory, as an absolute address.
    pub address: u64,
    /// Direction.
    pub op: Op,
    /// Whether a status frame is expected.
    pub version: DataVersion,
}

/// A header whose operation is none that exists.
///
/// Real targets take it for a read; this engine rejects it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown operation byte {opcode:#04x}")]
#[non_exhaustive]
pub struct UnknownOpcode {
    /// The operation byte.
    pub opcode: u8,
    /// Whether the flag for a status frame is set, so that the rejection can be said.
    pub version: DataVersion,
}

impl Header {
    /// Encodes the header; the padding is zero.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[..8].copy_from_slice(&self.size.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.address.to_le_bytes());
        let op = match self.op {
            Op::Read => 0,
            Op::Write => 1,
        };
        bytes[16] = match self.version {
            DataVersion::V1 => op,
            DataVersion::V2 => op | VERSION_2_FLAG,
        };
        bytes
    }

    /// Decodes a header; the padding is ignored.
    ///
    /// # Errors
    /// [`UnknownOpcode`] unless the operation is read or write.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, UnknownOpcode> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let opcode = bytes[16];
        let version = if opcode & VERSION_2_FLAG == 0 {
            DataVersion::V1
        } else {
            DataVersion::V2
        };
        let op = match opcode & !VERSION_2_FLAG {
            0 => Op::Read,
            1 => Op::Write,
            _ => return Err(UnknownOpcode { opcode, version }),
        };
        Ok(Self {
            size: word(0),
            address: word(8),
            op,
            version,
        })
    }
}

/// What a status frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "`Other` is for what may come")]
pub enum Status {
    /// The request is served; for a write, all bytes are stored.
    Ok,
    /// The target refuses the address range.
    Rejected,
    /// A failure code that is not defined.
    Other(u32),
}

/// Eight bytes that are no status frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{word:#018x} is no status frame")]
#[non_exhaustive]
pub struct BadStatus {
    /// The bytes as a little-endian number.
    pub word: u64,
}

impl Status {
    /// Encodes the frame.
    pub fn encode(self) -> [u8; STATUS_LEN] {
        let code = match self {
            Self::Ok => 0,
            Self::Rejected => 1,
            Self::Other(code) => code,
        };
        (u64::from(STATUS_MAGIC) << 32 | u64::from(code)).to_le_bytes()
    }

    /// Decodes a frame.
    ///
    /// # Errors
    /// [`BadStatus`] if the magic number is missing; the connection must then be dropped.
    pub fn decode(bytes: [u8; STATUS_LEN]) -> Result<Self, BadStatus> {
        let word = u64::from_le_bytes(bytes);
        // Left out with `--cfg slab_twin`, for the fuzz target to notice.
        if (word >> 32) as u32 != STATUS_MAGIC && !cfg!(slab_twin) {
            return Err(BadStatus { word });
        }
        Ok(match word as u32 {
            0 => Self::Ok,
            1 => Self::Rejected,
            code => Self::Other(code),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(header: Header, bytes: [u8; HEADER_LEN]) {
        assert_eq!(header.encode(), bytes);
        assert_eq!(Header::decode(&bytes), Ok(header));
    }

    #[test]
    fn request_headers_are_24_bytes_as_on_the_wire() {
        let request = |op, version| Header {
            size: 4,
            address: 0x0000_7000_0000_0000,
            op,
            version,
        };
        let bytes = |opcode| {
            let mut bytes = [0; HEADER_LEN];
            bytes[0] = 4;
            bytes[13] = 0x70;
            bytes[16] = opcode;
            bytes
        };
        check(request(Op::Write, DataVersion::V2), bytes(0x81));
        check(request(Op::Read, DataVersion::V2), bytes(0x80));
        check(request(Op::Write, DataVersion::V1), bytes(0x01));
        check(request(Op::Read, DataVersion::V1), bytes(0x00));
    }

    // row: W7.1a
    #[test]
    fn padding_is_sent_as_zero_and_ignored_when_received() {
        let header = Header {
            size: 9,
            address: 77,
            op: Op::Read,
            version: DataVersion::V2,
        };
        let mut bytes = header.encode();
        assert_eq!(bytes[17..], [0; 7]);
        bytes[17..].fill(0xAB);
        assert_eq!(Header::decode(&bytes), Ok(header));
    }

    #[test]
    fn unknown_operations_are_refused_with_the_version_they_asked_for() {
        for (opcode, version) in [
            (0x02, DataVersion::V1),
            (0x7F, DataVersion::V1),
            (0x82, DataVersion::V2),
            (0xFF, DataVersion::V2),
        ] {
            let mut bytes = [0; HEADER_LEN];
            bytes[16] = opcode;
            assert_eq!(
                Header::decode(&bytes),
                Err(UnknownOpcode { opcode, version })
            );
        }
    }

    #[test]
    fn status_frames_are_as_on_the_wire() {
        let cases = [
            (Status::Ok, [0, 0, 0, 0, 0x56, 0x54, 0x43, 0x4D]),
            (Status::Rejected, [1, 0, 0, 0, 0x56, 0x54, 0x43, 0x4D]),
            (Status::Other(2), [2, 0, 0, 0, 0x56, 0x54, 0x43, 0x4D]),
        ];
        for (status, bytes) in cases {
            assert_eq!(status.encode(), bytes);
            assert_eq!(Status::decode(bytes), Ok(status));
        }
        assert_eq!(Status::decode([0; 8]), Err(BadStatus { word: 0 }));
    }
}
