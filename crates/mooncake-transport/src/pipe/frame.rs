//! Pure codecs of what a pipe sends: notices, answers, and the image of a tensor.
//!
//! Everything here comes from outside: nothing panics, and every length is checked before it is used.
//!
//! A notice is two frames, the address and the length of an image in the sender's memory. A third
//! frame, which peers that do not know it leave unread, is JSON: `{"v":1,"session":"host:port","id":7}`,
//! with `"none":true` where there is no tensor. An answer is `ACK`, or `NAK` from a receiver that
//! gave up; to a notice with a third frame it has a second frame, the id.

pub(in crate::pipe) mod image;

use serde::{Deserialize, Serialize};

pub use image::{Dtype, ImageError, ImageHead, NONE_VALUE, head_len, none_image};

use crate::wire::name::PeerName;

/// Frames of the longest notice.
const NOTICE_FRAMES_MAX: usize = 3;

/// Longest frame accepted, in bytes: a third frame with the longest session name has about 600.
pub const FRAME_BYTES_MAX: usize = 1_024;

/// The version of the third frame.
const NOTE_VERSION: u64 = 1;

/// The third frame of a notice.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_structs,
    reason = "the version of the frame fixes it"
)]
pub struct Note {
    /// The name by which the sender's engine is reached.
    pub session: String,
    /// Number of the notice; each is one more than the one before, the first is any.
    pub id: u64,
    /// Whether the image stands for "no tensor".
    pub is_none: bool,
}

/// Tells a receiver where an image is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "the frames of the message")]
pub struct Notice {
    /// Address of the image at the sender.
    pub address: u64,
    /// Its length in bytes.
    pub len: u64,
    /// What a peer of our kind adds.
    pub note: Option<Note>,
}

/// Why a notice was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoticeError {
    /// A notice has two or three frames.
    #[error("a notice of {count} frames")]
    FrameCount {
        /// Frames received; four stands for more, too.
        count: usize,
    },
    /// The first two frames have eight bytes each.
    #[error("frame {index} of a notice has {len} bytes instead of 8")]
    FrameLen {
        /// Which frame, counted from 0.
        index: usize,
        /// Its bytes.
        len: usize,
    },
    /// The third frame is not what a peer of our kind sends.
    #[error("the third frame of a notice is unreadable")]
    Note,
    /// The third frame is of a later version.
    #[error("the third frame of a notice has version {version}; only 1 is known")]
    Version {
        /// The version.
        version: u64,
    },
    /// The third frame names no session that could be dialled.
    #[error("the third frame of a notice names no session")]
    Session,
    /// The range of bytes does not exist.
    #[error("a notice of {len} bytes at {address:#x}, which end beyond the address space")]
    Range {
        /// The address.
        address: u64,
        /// The length.
        len: u64,
    },
    /// The number is not the one after the notice before: a notice was lost, or the peer is another.
    #[error("a notice has id {id} where {expected} was due")]
    Sequence {
        /// The id.
        id: u64,
        /// The id expected.
        expected: u64,
    },
    /// Some notices of the peer have a third frame and others have none.
    #[error("the peer adds a third frame to some of its notices only")]
    Mixed,
}

/// The third frame as it is written.
#[derive(Serialize, Deserialize)]
struct RawNote {
    v: u64,
    session: String,
    id: u64,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    none: bool,
}

impl Notice {
    /// Returns the frames.
    pub fn encode(&self) -> Vec<Vec<u8>> {
        let mut frames = vec![
            self.address.to_be_bytes().to_vec(),
            self.len.to_be_bytes().to_vec(),
        ];
        if let Some(note) = &self.note {
            let raw = RawNote {
                v: NOTE_VERSION,
                session: note.session.clone(),
                id: note.id,
                none: note.is_none,
            };
            // Texts and numbers alone: there is nothing in it that JSON cannot say.
            frames.push(serde_json::to_vec(&raw).unwrap_or_default());
        }
        frames
    }

    /// Reads the frames.
    ///
    /// # Errors
    /// [`NoticeError`]; the notice has been consumed and cannot be answered by its number.
    pub fn decode(frames: &[Vec<u8>]) -> Result<Self, NoticeError> {
        let (two, third) = match frames {
            [address, len] => ([address, len], None),
            [address, len, third] => ([address, len], Some(third)),
            _ => {
                let count = frames.len();
                return Err(NoticeError::FrameCount { count });
            }
        };
        let number = |index: usize| -> Result<u64, NoticeError> {
            let frame: &[u8] = two[index];
            let bytes = frame.try_into().map_err(|_| NoticeError::FrameLen {
                index,
                len: frame.len(),
            })?;
            Ok(u64::from_be_bytes(bytes))
        };
        let (address, len) = (number(0)?, number(1)?);
        // Left out with `--cfg slab_twin`, for the fuzz target to notice.
        if address.checked_add(len).is_none() && !cfg!(slab_twin) {
            return Err(NoticeError::Range { address, len });
        }
        let note = third.map(|frame| decode_note(frame)).transpose()?;
        Ok(Self { address, len, note })
    }
}

fn decode_note(frame: &[u8]) -> Result<Note, NoticeError> {
    /// What every version has.
    #[derive(Deserialize)]
    struct Version {
        v: u64,
    }
    if frame.len() > FRAME_BYTES_MAX {
        return Err(NoticeError::Note);
    }
    let Version { v } = serde_json::from_slice(frame).map_err(|_| NoticeError::Note)?;
    if v != NOTE_VERSION {
        return Err(NoticeError::Version { version: v });
    }
    let raw: RawNote = serde_json::from_slice(frame).map_err(|_| NoticeError::Note)?;
    // The parser assumes a port where there is none; a session always says it.
    match PeerName::parse(&raw.session) {
        Ok(name) if name.port() > 0 && name.to_string() == raw.session => Ok(Note {
            session: raw.session,
            id: raw.id,
            is_none: raw.none,
        }),
        _ => Err(NoticeError::Session),
    }
}

/// What a receiver says about a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "there is no third answer")]
pub enum Verdict {
    /// The bytes are there; the sender may reuse its memory.
    Taken,
    /// The receiver gave up: it has no use for the sender's memory any more, and receives no further.
    Failed,
}

/// A receiver's answer to a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "the frames of the message")]
pub struct Answer {
    /// What became of the message.
    pub verdict: Verdict,
    /// The number of the notice, if it had one.
    pub id: Option<u64>,
}

/// Why an answer was refused. No buffer is freed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AnswerError {
    /// An answer has one or two frames.
    #[error("an answer of {count} frames")]
    FrameCount {
        /// Frames received; four stands for more, too.
        count: usize,
    },
    /// The first frame is neither `ACK` nor `NAK`.
    #[error("an answer that is neither ACK nor NAK")]
    Word,
    /// The second frame has eight bytes.
    #[error("the second frame of an answer has {len} bytes instead of 8")]
    IdLen {
        /// Its bytes.
        len: usize,
    },
    /// Nothing was waiting for an answer: one came twice.
    #[error("an answer to nothing")]
    Unexpected,
    /// The number is not the one of the oldest notice that waits.
    #[error("an answer to {id} where one to {expected} was due")]
    Sequence {
        /// The id.
        id: u64,
        /// The id expected.
        expected: u64,
    },
    /// The peer was sent no number and answers with one.
    #[error("an answer with a number to a notice without one")]
    NoNumber,
    /// The peer's answers had numbers and this one has none.
    #[error("the peer answers with a number to some notices only")]
    Mixed,
}

impl Answer {
    /// Returns the frames.
    pub fn encode(&self) -> Vec<Vec<u8>> {
        let word: &[u8] = match self.verdict {
            Verdict::Taken => b"ACK",
            Verdict::Failed => b"NAK",
        };
        let mut frames = vec![word.to_vec()];
        frames.extend(self.id.map(|id| id.to_be_bytes().to_vec()));
        frames
    }

    /// Reads the frames.
    ///
    /// # Errors
    /// [`AnswerError::FrameCount`], [`AnswerError::Word`], [`AnswerError::IdLen`].
    pub fn decode(frames: &[Vec<u8>]) -> Result<Self, AnswerError> {
        let (word, id) = match frames {
            [word] => (word, None),
            [word, id] => (word, Some(id)),
            _ => {
                let count = frames.len();
                return Err(AnswerError::FrameCount { count });
            }
        };
        let verdict = match word.as_slice() {
            b"ACK" => Verdict::Taken,
            b"NAK" => Verdict::Failed,
            _ => return Err(AnswerError::Word),
        };
        let id = id
            .map(|id| match <[u8; 8]>::try_from(id.as_slice()) {
                Ok(bytes) => Ok(u64::from_be_bytes(bytes)),
                Err(_) => Err(AnswerError::IdLen { len: id.len() }),
            })
            .transpose()?;
        Ok(Self { verdict, id })
    }
}

/// Frames kept of one message: one more than any has, so that too many are noticed.
pub(super) const FRAMES_KEPT: usize = NOTICE_FRAMES_MAX + 1;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn note() -> Note {
        Note {
            session: "10.0.0.1:5000".into(),
            id: 7,
            is_none: false,
        }
    }

    fn with_third(third: &[u8]) -> Result<Notice, NoticeError> {
        Notice::decode(&[vec![0; 8], vec![0; 8], third.to_vec()])
    }

    // row: P4.1
    #[test]
    fn a_notice_is_two_numbers_in_network_order() {
        let notice = Notice {
            address: 0x0102_0304_0506_0708,
            len: 80,
            note: None,
        };
        let frames = notice.encode();
        assert_eq!(
            frames,
            [vec![1, 2, 3, 4, 5, 6, 7, 8], vec![0, 0, 0, 0, 0, 0, 0, 80]]
        );
        assert_eq!(Notice::decode(&frames), Ok(notice));
    }

    // row: P4.1
    #[test]
    fn a_third_frame_says_session_and_number() {
        let mut notice = Notice {
            address: 1,
            len: 2,
            note: Some(note()),
        };
        let frames = notice.encode();
        assert_eq!(frames[2], br#"{"v":1,"session":"10.0.0.1:5000","id":7}"#);
        assert_eq!(Notice::decode(&frames), Ok(notice.clone()));
        notice.note.as_mut().unwrap().is_none = true;
        let frames = notice.encode();
        assert!(frames[2].ends_with(br#","none":true}"#));
        assert_eq!(Notice::decode(&frames), Ok(notice));
        // A later peer of the same version may say more.
        let more = with_third(br#"{"x":[1],"id":7,"session":"10.0.0.1:5000","v":1}"#).unwrap();
        assert_eq!(more.note, Some(note()));
    }

    // row: P7.11, P7.12
    #[test]
    fn a_notice_of_another_form_is_refused() {
        let decode = |lens: &[usize]| {
            let frames: Vec<Vec<u8>> = lens.iter().map(|len| vec![0; *len]).collect();
            Notice::decode(&frames).unwrap_err()
        };
        for lens in [&[][..], &[8], &[8, 8, 8, 8], &[0]] {
            let count = lens.len();
            assert_eq!(decode(lens), NoticeError::FrameCount { count });
        }
        for (lens, index) in [([7, 8], 0), ([8, 9], 1), ([0, 0], 0), ([8, 0], 1)] {
            let len = lens[index];
            assert_eq!(decode(&lens), NoticeError::FrameLen { index, len });
        }
        let high = u64::MAX.to_be_bytes().to_vec();
        assert_eq!(
            Notice::decode(&[high.clone(), high]),
            Err(NoticeError::Range {
                address: u64::MAX,
                len: u64::MAX
            })
        );
    }

    // row: P7.11, P7.12
    #[test]
    fn an_unreadable_third_frame_is_refused() {
        let long = format!(r#"{{"v":1,"session":"{}:1","id":1}}"#, "a".repeat(1_100));
        let deep = "[".repeat(1_000);
        for bad in [
            "",
            "ACK",
            "[]",
            "{}",
            "null",
            r#"{"v":1}"#,
            r#"{"v":1,"session":"a:1"}"#,
            r#"{"v":1,"session":"a:1","id":-1}"#,
            r#"{"v":1,"session":"a:1","id":"1"}"#,
            r#"{"v":1,"session":7,"id":1}"#,
            r#"{"v":1,"session":"a:1","id":1,"none":1}"#,
            r#"{"v":1,"session":"a:1","id":1} x"#,
            &long,
            &deep,
        ] {
            assert_eq!(with_third(bad.as_bytes()), Err(NoticeError::Note), "{bad}");
        }
        assert_eq!(with_third(b"\xff\xfe"), Err(NoticeError::Note));
        let later = with_third(br#"{"v":2,"anything":0}"#);
        assert_eq!(later, Err(NoticeError::Version { version: 2 }));
        for session in ["", "a", "a:0", "/a:1", "a b:1", "a:b"] {
            let text = format!(r#"{{"v":1,"session":"{session}","id":1}}"#);
            assert_eq!(
                with_third(text.as_bytes()),
                Err(NoticeError::Session),
                "{session}"
            );
        }
    }

    // row: P4.2
    #[test]
    fn an_answer_is_one_word_and_perhaps_a_number() {
        let check = |verdict, id, frames: &[&[u8]]| {
            let answer = Answer { verdict, id };
            let frames: Vec<Vec<u8>> = frames.iter().map(|frame| frame.to_vec()).collect();
            assert_eq!(answer.encode(), frames);
            assert_eq!(Answer::decode(&frames), Ok(answer));
        };
        check(Verdict::Taken, None, &[b"ACK"]);
        check(Verdict::Failed, None, &[b"NAK"]);
        check(
            Verdict::Taken,
            Some(258),
            &[b"ACK", b"\0\0\0\0\0\0\x01\x02"],
        );
    }

    // row: P7.2
    #[test]
    fn an_answer_of_another_form_is_refused() {
        let decode = |frames: &[&[u8]]| {
            let frames: Vec<Vec<u8>> = frames.iter().map(|frame| frame.to_vec()).collect();
            Answer::decode(&frames).unwrap_err()
        };
        for word in [&b""[..], b"ack", b"ACK ", b"OK", b"ACK\0"] {
            assert_eq!(decode(&[word]), AnswerError::Word);
        }
        assert_eq!(decode(&[]), AnswerError::FrameCount { count: 0 });
        let three: [&[u8]; 3] = [b"ACK", b"", b""];
        assert_eq!(decode(&three), AnswerError::FrameCount { count: 3 });
        assert_eq!(decode(&[b"ACK", b"1"]), AnswerError::IdLen { len: 1 });
    }

    proptest! {
        // row: P8.4
        #[test]
        fn property_any_frames_are_read_or_refused(
            frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..12), 0..5),
            third in r#"(\{"v":[0-2],"session":"[a-z:0-9]{0,5}","id":[0-9]{1,20}\}|.{0,30})"#,
        ) {
            let mut frames = frames;
            if let Ok(notice) = Notice::decode(&frames) {
                prop_assert_eq!(notice.encode()[..2].to_vec(), frames[..2].to_vec());
            }
            if let Ok(answer) = Answer::decode(&frames) {
                prop_assert_eq!(answer.encode(), frames.clone());
            }
            frames = vec![vec![1; 8], vec![2; 8], third.into_bytes()];
            if let Ok(notice) = Notice::decode(&frames) {
                prop_assert_eq!(Notice::decode(&notice.encode()), Ok(notice));
            }
        }
    }
}
