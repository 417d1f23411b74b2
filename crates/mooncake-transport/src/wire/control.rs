//! Frames of the control connection, and the requests and replies in them.
//!
//! A frame is a little-endian 64-bit length, a type byte and JSON text; the length counts the type
//! byte. One connection carries one request and one reply. Peers from before the type byte send the
//! JSON alone; such frames are connection requests and are answered alike.

use serde::Serialize;
use serde::de::{IgnoredAny, MapAccess};

use super::json::{self, Document, JsonError, Members, Scalar};

/// Bytes of the length that precedes every frame.
pub const LENGTH_LEN: usize = 8;

/// Largest frame a real peer reads unless told otherwise.
pub const PEER_FRAME_BYTES_MAX: u64 = 1 << 20;

/// Largest frame this engine reads as a client, and as a server if the body is not stored.
pub const FRAME_BYTES_MAX: u64 = 128 << 20;

/// What a frame is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FrameKind {
    /// Set-up of a queue pair; an engine without any answers it too.
    Connection,
    /// Exchange of descriptors.
    Metadata,
    /// A notification.
    Notify,
    /// A liveness probe.
    Probe,
    /// A connection request or reply from before the type byte.
    Untyped,
}

/// First byte of an untyped frame, which starts with its JSON object.
const UNTYPED_FIRST: u8 = b'{';

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            0 => Self::Connection,
            1 => Self::Metadata,
            2 => Self::Notify,
            3 => Self::Probe,
            UNTYPED_FIRST => Self::Untyped,
            _ => return None,
        })
    }

    fn byte(self) -> Option<u8> {
        match self {
            Self::Connection => Some(0),
            Self::Metadata => Some(1),
            Self::Notify => Some(2),
            Self::Probe => Some(3),
            Self::Untyped => None,
        }
    }
}

/// Encodes a frame of `kind` around JSON text.
pub fn encode_frame(kind: FrameKind, json: &[u8]) -> Vec<u8> {
    let type_byte = kind.byte();
    let len = json.len() + usize::from(type_byte.is_some());
    let mut frame = Vec::with_capacity(LENGTH_LEN + len);
    frame.extend_from_slice(&(len as u64).to_le_bytes());
    frame.extend(type_byte);
    frame.extend_from_slice(json);
    frame
}

/// A received frame.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a frame has a type and a text")]
pub struct Frame {
    /// What the frame is about.
    pub kind: FrameKind,
    /// The JSON text; empty if the decoder was told not to store it.
    pub body: Vec<u8>,
}

/// Why a frame was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// A frame of no bytes, not even a type.
    #[error("the frame is empty")]
    Empty,
    /// The frame is longer than is accepted.
    #[error("the frame has {len} bytes, more than the {max} accepted")]
    TooLong {
        /// Bytes announced.
        len: u64,
        /// Bytes accepted.
        max: u64,
    },
    /// The type byte is none that exists.
    #[error("unknown frame type {byte:#04x}")]
    UnknownType {
        /// The byte.
        byte: u8,
    },
}

/// What a [`FrameDecoder`] accepts; made from one of the constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FrameLimits {
    /// Longest metadata frame, type byte included.
    pub metadata_bytes_max: u64,
    /// Longest other frame, type byte included.
    pub other_bytes_max: u64,
    /// Whether the text of metadata frames is stored.
    pub store_metadata: bool,
}

impl FrameLimits {
    /// Limits of a server: the text of metadata requests is not needed, so it may be long.
    pub const SERVER: Self = Self {
        metadata_bytes_max: FRAME_BYTES_MAX,
        other_bytes_max: PEER_FRAME_BYTES_MAX,
        store_metadata: false,
    };

    /// Limits of a client that reads replies.
    pub const CLIENT: Self = Self {
        metadata_bytes_max: FRAME_BYTES_MAX,
        other_bytes_max: PEER_FRAME_BYTES_MAX,
        store_metadata: true,
    };
}

/// An incremental decoder of one frame.
///
/// # Complexity
/// Holds what has arrived of the text, never what was merely announced.
#[derive(Debug)]
pub struct FrameDecoder {
    limits: FrameLimits,
    state: DecoderState,
}

#[derive(Debug)]
enum DecoderState {
    Length {
        bytes: [u8; LENGTH_LEN],
        have: usize,
    },
    Type {
        len: u64,
    },
    Body {
        kind: FrameKind,
        missing: u64,
        store: bool,
        body: Vec<u8>,
    },
    Failed(FrameError),
    Done,
}

impl FrameDecoder {
    /// Creates a decoder that has seen nothing yet.
    pub fn new(limits: FrameLimits) -> Self {
        Self {
            limits,
            state: DecoderState::Length {
                bytes: [0; LENGTH_LEN],
                have: 0,
            },
        }
    }

    /// Takes the next bytes and returns the frame once it is complete.
    ///
    /// Bytes after the frame are ignored, as are calls after it was returned.
    ///
    /// # Errors
    /// [`FrameError`], again on every later call.
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<Option<Frame>, FrameError> {
        loop {
            match &mut self.state {
                DecoderState::Length {
                    bytes: length,
                    have,
                } => {
                    let count = bytes.len().min(LENGTH_LEN - *have);
                    length[*have..*have + count].copy_from_slice(&bytes[..count]);
                    *have += count;
                    bytes = &bytes[count..];
                    if *have < LENGTH_LEN {
                        return Ok(None);
                    }
                    let len = u64::from_le_bytes(*length);
                    let max = self
                        .limits
                        .metadata_bytes_max
                        .max(self.limits.other_bytes_max);
                    if len == 0 {
                        return Err(self.fail(FrameError::Empty));
                    }
                    if len > max {
                        return Err(self.fail(FrameError::TooLong { len, max }));
                    }
                    self.state = DecoderState::Type { len };
                }
                DecoderState::Type { len } => {
                    let len = *len;
                    let Some(&byte) = bytes.first() else {
                        return Ok(None);
                    };
                    let Some(kind) = FrameKind::from_byte(byte) else {
                        return Err(self.fail(FrameError::UnknownType { byte }));
                    };
                    let metadata = kind == FrameKind::Metadata;
                    let max = if metadata {
                        self.limits.metadata_bytes_max
                    } else {
                        self.limits.other_bytes_max
                    };
                    // Left out with `--cfg slab_twin`, for the fuzz target to notice.
                    if len > max && !cfg!(slab_twin) {
                        return Err(self.fail(FrameError::TooLong { len, max }));
                    }
                    // The first byte of an untyped frame belongs to its text.
                    let missing = if kind == FrameKind::Untyped {
                        len
                    } else {
                        bytes = &bytes[1..];
                        len - 1
                    };
                    let store = !metadata || self.limits.store_metadata;
                    self.state = DecoderState::Body {
                        kind,
                        missing,
                        store,
                        body: Vec::new(),
                    };
                }
                DecoderState::Body {
                    kind,
                    missing,
                    store,
                    body,
                } => {
                    let count = usize::try_from(*missing)
                        .unwrap_or(usize::MAX)
                        .min(bytes.len());
                    if *store {
                        body.extend_from_slice(&bytes[..count]);
                    }
                    *missing -= count as u64;
                    if *missing > 0 {
                        return Ok(None);
                    }
                    let frame = Frame {
                        kind: *kind,
                        body: std::mem::take(body),
                    };
                    self.state = DecoderState::Done;
                    return Ok(Some(frame));
                }
                DecoderState::Failed(error) => return Err(*error),
                DecoderState::Done => return Ok(None),
            }
        }
    }

    fn fail(&mut self, error: FrameError) -> FrameError {
        self.state = DecoderState::Failed(error);
        error
    }
}

/// A notification.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "the wire has these two texts")]
pub struct Notice {
    /// Free text that names the notification.
    pub name: String,
    /// Free text.
    pub message: String,
}

#[derive(Serialize)]
struct EncodedNotice<'a> {
    name: &'a str,
    notify_msg: &'a str,
}

#[derive(Default)]
struct RawNotice {
    name: Scalar,
    message: Scalar,
}

impl Members for RawNotice {
    fn take<'de, A: MapAccess<'de>>(&mut self, member: &str, map: &mut A) -> Result<(), A::Error> {
        match member {
            "name" => self.name = map.next_value()?,
            "notify_msg" => self.message = map.next_value()?,
            _ => drop(map.next_value::<IgnoredAny>()?),
        }
        Ok(())
    }
}

impl Notice {
    /// Encodes the notification as JSON, without a newline.
    pub fn encode(&self) -> String {
        let encoded = EncodedNotice {
            name: &self.name,
            notify_msg: &self.message,
        };
        // A struct of strings always encodes.
        serde_json::to_string(&encoded).unwrap_or_default()
    }

    /// Decodes a notification; numbers and booleans become text, what is missing becomes empty.
    ///
    /// # Errors
    /// [`JsonError`] if the text is no JSON object or a member is an array or an object.
    pub fn decode(body: &[u8]) -> Result<Self, JsonError> {
        let raw = match json::decode::<Document<RawNotice>>(body)? {
            Document::Object(raw) => raw,
            Document::Null => RawNotice::default(),
            Document::Other => return Err(JsonError::NotAnObject),
        };
        Ok(Self {
            name: raw.name.into_text("name")?,
            message: raw.message.into_text("notify_msg")?,
        })
    }
}

/// The reply to a notification that was taken.
pub const NOTIFY_TAKEN: &[u8] = b"{\"name\":\"\",\"notify_msg\":\"success\"}\n";

/// The reply to a probe.
pub const PROBE_ALIVE: &[u8] = b"{\"status\":\"success\"}\n";

/// The reply to a connection request from an engine that has no queue pairs.
pub const CONNECTION_EMPTY: &[u8] = b"{\"local_gid\":\"\",\"local_lid\":0,\"local_nic_path\":\"\",\
    \"payload\":\"\",\"peer_nic_path\":\"\",\"qp_num\":[],\"reply_msg\":\"\"}\n";

/// The request of a probe.
pub const PROBE_REQUEST: &[u8] = b"{}";

/// Checks a connection request, which an engine without queue pairs need not understand.
///
/// # Errors
/// [`JsonError`] if the text is neither a JSON object nor `null`.
pub fn check_connection(body: &[u8]) -> Result<(), JsonError> {
    match json::decode::<Document<Ignored>>(body)? {
        Document::Object(_) | Document::Null => Ok(()),
        Document::Other => Err(JsonError::NotAnObject),
    }
}

/// Checks that `body` is JSON at all, as for a probe.
///
/// # Errors
/// [`JsonError`] if it is not.
pub fn check_json(body: &[u8]) -> Result<(), JsonError> {
    json::decode::<IgnoredAny>(body).map(drop)
}

#[derive(Default)]
struct Ignored;

impl Members for Ignored {
    fn take<'de, A: MapAccess<'de>>(&mut self, _: &str, map: &mut A) -> Result<(), A::Error> {
        map.next_value::<IgnoredAny>().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(bytes: &[u8]) -> Result<Option<Frame>, FrameError> {
        FrameDecoder::new(FrameLimits::CLIENT).push(bytes)
    }

    #[test]
    fn frames_are_as_on_the_wire() {
        assert_eq!(
            encode_frame(FrameKind::Probe, PROBE_REQUEST),
            [3, 0, 0, 0, 0, 0, 0, 0, 3, 0x7B, 0x7D]
        );
        let reply = encode_frame(FrameKind::Probe, PROBE_ALIVE);
        assert_eq!(reply[..9], [0x16, 0, 0, 0, 0, 0, 0, 0, 3]);
        assert_eq!(&reply[9..], b"{\"status\":\"success\"}\n");
        assert_eq!(
            encode_frame(FrameKind::Metadata, b"{}"),
            [3, 0, 0, 0, 0, 0, 0, 0, 1, 0x7B, 0x7D]
        );
    }

    // row: W3.5a, W9b
    #[test]
    fn notifications_are_as_on_the_wire() {
        let notice = Notice {
            name: "n1".into(),
            message: "payload".into(),
        };
        let frame = encode_frame(FrameKind::Notify, notice.encode().as_bytes());
        assert_eq!(frame[..9], [0x25, 0, 0, 0, 0, 0, 0, 0, 2]);
        assert_eq!(&frame[9..], br#"{"name":"n1","notify_msg":"payload"}"#);
        let reply = encode_frame(FrameKind::Notify, NOTIFY_TAKEN);
        assert_eq!(reply[..9], [0x24, 0, 0, 0, 0, 0, 0, 0, 2]);
        assert_eq!(&reply[9..], b"{\"name\":\"\",\"notify_msg\":\"success\"}\n");
    }

    #[test]
    fn a_frame_is_decoded_however_its_bytes_are_split() {
        for (kind, body) in [
            (FrameKind::Notify, &br#"{"name":"n","notify_msg":"m"}"#[..]),
            (FrameKind::Untyped, br#"{"qp_num":[]}"#),
            (FrameKind::Probe, b""),
        ] {
            let bytes = encode_frame(kind, body);
            let expected = Frame {
                kind,
                body: body.to_vec(),
            };
            for first in 0..bytes.len() {
                for second in first..bytes.len() {
                    let mut decoder = FrameDecoder::new(FrameLimits::SERVER);
                    assert_eq!(decoder.push(&bytes[..first]), Ok(None));
                    assert_eq!(decoder.push(&bytes[first..second]), Ok(None));
                    assert_eq!(decoder.push(&bytes[second..]), Ok(Some(expected.clone())));
                    assert_eq!(decoder.push(b"more"), Ok(None));
                }
            }
        }
    }

    // row: W3.2b
    #[test]
    fn lengths_from_one_to_the_limit_are_accepted_and_no_others() {
        let length = |len: u64, kind: u8| [&len.to_le_bytes()[..], &[kind]].concat();
        let server = |bytes: &[u8]| FrameDecoder::new(FrameLimits::SERVER).push(bytes);
        assert_eq!(server(&0u64.to_le_bytes()), Err(FrameError::Empty));
        assert_eq!(
            server(&u64::MAX.to_le_bytes()),
            Err(FrameError::TooLong {
                len: u64::MAX,
                max: FRAME_BYTES_MAX
            })
        );
        assert!(matches!(
            server(&length(1, 3)),
            Ok(Some(Frame {
                kind: FrameKind::Probe,
                ..
            }))
        ));
        assert_eq!(server(&length(PEER_FRAME_BYTES_MAX, 2)), Ok(None));
        assert_eq!(
            server(&length(PEER_FRAME_BYTES_MAX + 1, 2)),
            Err(FrameError::TooLong {
                len: PEER_FRAME_BYTES_MAX + 1,
                max: PEER_FRAME_BYTES_MAX
            })
        );
        assert_eq!(server(&length(FRAME_BYTES_MAX, 1)), Ok(None));
        let mut exact = encode_frame(FrameKind::Notify, &vec![b' '; (1 << 20) - 1]);
        assert_eq!(exact[..8], (1u64 << 20).to_le_bytes());
        assert!(matches!(server(&exact), Ok(Some(frame)) if frame.body.len() == (1 << 20) - 1));
        exact.truncate(100);
        assert_eq!(server(&exact), Ok(None));
    }

    // row: W3.3b
    #[test]
    fn every_type_byte_but_the_known_ones_and_an_open_brace_is_refused() {
        for byte in 0..=u8::MAX {
            let mut bytes = encode_frame(FrameKind::Probe, b"{}");
            bytes[8] = byte;
            let result = decode(&bytes);
            match byte {
                0..=3 => assert_eq!(result.unwrap().unwrap().body, b"{}"),
                0x7B => assert_eq!(result.unwrap().unwrap().body, b"{{}"),
                _ => assert_eq!(result, Err(FrameError::UnknownType { byte })),
            }
        }
    }

    #[test]
    fn a_server_does_not_store_what_peers_say_about_themselves() {
        let bytes = encode_frame(FrameKind::Metadata, &[b'x'; 5000]);
        let mut decoder = FrameDecoder::new(FrameLimits::SERVER);
        let frame = decoder.push(&bytes).unwrap().unwrap();
        assert!(frame.body.is_empty() && frame.body.capacity() == 0);
    }

    #[test]
    fn an_announced_length_alone_takes_no_memory() {
        let mut decoder = FrameDecoder::new(FrameLimits::CLIENT);
        decoder.push(&FRAME_BYTES_MAX.to_le_bytes()).unwrap();
        decoder.push(&[1, b'{']).unwrap();
        let DecoderState::Body { body, .. } = &decoder.state else {
            panic!()
        };
        assert!(body.capacity() < 1024);
    }

    // row: W3.5b, W13.1369
    #[test]
    fn inputs_that_kill_real_peers_are_typed_errors() {
        for body in [
            "[]",
            "\"x\"",
            "5",
            r#"{"name":[]}"#,
            r#"{"notify_msg":{}}"#,
            "{",
            "",
        ] {
            assert!(Notice::decode(body.as_bytes()).is_err(), "{body}");
        }
        assert!(check_connection(b"[]").is_err());
        for deep in [format!("{}1", "[".repeat(1_001)), "{\"a\":".repeat(200_000)] {
            assert!(matches!(
                Notice::decode(deep.as_bytes()),
                Err(JsonError::TooDeep { .. })
            ));
            assert!(matches!(
                check_json(deep.as_bytes()),
                Err(JsonError::TooDeep { .. })
            ));
            assert!(matches!(
                check_connection(deep.as_bytes()),
                Err(JsonError::TooDeep { .. })
            ));
        }
    }

    #[test]
    fn lenient_notifications_are_read_as_real_peers_read_them() {
        let check = |body: &str, name: &str, message: &str| {
            let notice = Notice::decode(body.as_bytes()).unwrap();
            assert_eq!((&*notice.name, &*notice.message), (name, message), "{body}");
        };
        check(r#"{"name":5,"notify_msg":true}"#, "5", "true");
        check(r#"{"name":1e2,"notify_msg":null}"#, "100.0", "");
        check("{}", "", "");
        check("null", "", "");
        check(
            r#"{"name":"a","name":"b","notify_msg":"\ud83d\ude00"} tail"#,
            "b",
            "\u{1f600}",
        );
        check("/* c */{\"name\":\"n\",\"x\":[1]}\n", "n", "");
    }

    #[test]
    fn connection_requests_are_objects_or_null() {
        for body in ["{}", "null", r#"{"qp_num":[1,2],"ready_ack":true}"#] {
            assert!(check_connection(body.as_bytes()).is_ok(), "{body}");
        }
        for body in ["", "5", "[]", "{"] {
            assert!(check_connection(body.as_bytes()).is_err(), "{body}");
        }
    }
}
