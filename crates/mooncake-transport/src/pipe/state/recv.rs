//! The receiving direction: what to do next with the message that is being received.

use super::Numbers;
use crate::pipe::error::{Broken, ReadFailure};
use crate::pipe::frame::{Answer, ImageError, ImageHead, NONE_VALUE, Notice, NoticeError, Verdict};

/// What the machine wants done next.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::pipe) enum RecvWant<'a> {
    /// Receive a notice, and pass it to [`RecvMachine::handle_notice`].
    Notice,
    /// Find a buffer of so many bytes, and pass it to [`RecvMachine::handle_room`].
    Room {
        /// Bytes of the image.
        len: u64,
    },
    /// Read the image into the buffer, and tell [`RecvMachine::handle_read`].
    Read {
        /// The name of the peer's engine, if the notice says it.
        session: Option<&'a str>,
        /// Address of the image at the peer.
        address: u64,
        /// Bytes of the image.
        len: u64,
        /// The second try: what is known of the peer's memory may be out of date.
        is_retry: bool,
    },
    /// Read the head of the image in the buffer, and tell [`RecvMachine::handle_image`].
    Image {
        /// Bytes of the image.
        len: u64,
    },
    /// Send the answer, and tell [`RecvMachine::handle_answered`].
    Answer(Answer),
    /// Call [`RecvMachine::deliver`].
    Deliver,
    /// Nothing; the direction has ended.
    Nothing(&'a Broken),
}

/// A message that has been received whole and answered.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::pipe) struct Delivery<B> {
    pub(in crate::pipe) buffer: B,
    pub(in crate::pipe) head: ImageHead,
    pub(in crate::pipe) is_none: bool,
}

/// At most one message under way, in a buffer of type `B`.
pub(in crate::pipe) struct RecvMachine<B> {
    len_max: u64,
    numbers: Numbers,
    /// Number of the next notice, once one has come.
    next_id: Option<u64>,
    state: State<B>,
}

enum State<B> {
    Idle,
    Noticed {
        notice: Notice,
    },
    Reading {
        notice: Notice,
        buffer: B,
        is_retry: bool,
    },
    Read {
        notice: Notice,
        buffer: B,
    },
    /// `then` is what comes after the answer.
    Answering {
        answer: Answer,
        then: Result<Delivery<B>, Broken>,
    },
    Received(Delivery<B>),
    Broken(Broken),
}

impl<B> RecvMachine<B> {
    /// Messages of up to `len_max` bytes are accepted.
    pub(in crate::pipe) fn new(len_max: u64) -> Self {
        Self {
            len_max,
            numbers: Numbers::Unheard,
            next_id: None,
            state: State::Idle,
        }
    }

    pub(in crate::pipe) fn want(&self) -> RecvWant<'_> {
        match &self.state {
            State::Idle => RecvWant::Notice,
            State::Noticed { notice } => RecvWant::Room { len: notice.len },
            State::Reading {
                notice, is_retry, ..
            } => RecvWant::Read {
                session: notice.note.as_ref().map(|note| note.session.as_str()),
                address: notice.address,
                len: notice.len,
                is_retry: *is_retry,
            },
            State::Read { notice, .. } => RecvWant::Image { len: notice.len },
            State::Answering { answer, .. } => RecvWant::Answer(*answer),
            State::Received(_) => RecvWant::Deliver,
            State::Broken(why) => RecvWant::Nothing(why),
        }
    }

    /// The buffer of the message under way.
    pub(in crate::pipe) fn buffer(&self) -> Option<&B> {
        match &self.state {
            State::Reading { buffer, .. } | State::Read { buffer, .. } => Some(buffer),
            _ => None,
        }
    }

    /// Whether the peer's notices have shown that it reads numbers in answers.
    pub(in crate::pipe) fn peer_uses_numbers(&self) -> bool {
        self.numbers == Numbers::Used
    }

    /// A notice has come.
    pub(in crate::pipe) fn handle_notice(&mut self, frames: &[Vec<u8>]) {
        if !matches!(self.state, State::Idle) {
            return;
        }
        match self.check_notice(frames) {
            Ok(notice) if notice.len > self.len_max => {
                let why = Broken::TooLong {
                    len: notice.len,
                    max: self.len_max,
                };
                self.give_up(number_of(&notice), why);
            }
            Ok(notice) => self.state = State::Noticed { notice },
            Err(error) => self.give_up(None, Broken::Notice(error)),
        }
    }

    fn check_notice(&mut self, frames: &[Vec<u8>]) -> Result<Notice, NoticeError> {
        let notice = Notice::decode(frames)?;
        if !self.numbers.note(notice.note.is_some()) {
            return Err(NoticeError::Mixed);
        }
        if let Some(note) = &notice.note {
            let id = note.id;
            match self.next_id {
                Some(expected) if expected != id => {
                    return Err(NoticeError::Sequence { id, expected });
                }
                _ => self.next_id = Some(id.wrapping_add(1)),
            }
        }
        Ok(notice)
    }

    /// A buffer for the message.
    pub(in crate::pipe) fn handle_room(&mut self, buffer: B) {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Noticed { notice } => {
                self.state = State::Reading {
                    notice,
                    buffer,
                    is_retry: false,
                };
            }
            other => self.state = other,
        }
    }

    /// The read has ended, and nothing touches the buffer any more. After a failure that says nothing
    /// about a later try it is made once more.
    pub(in crate::pipe) fn handle_read(&mut self, result: Result<(), (ReadFailure, Retry)>) {
        match (std::mem::replace(&mut self.state, State::Idle), result) {
            (State::Reading { notice, buffer, .. }, Ok(())) => {
                self.state = State::Read { notice, buffer };
            }
            (
                State::Reading {
                    notice,
                    buffer,
                    is_retry: false,
                },
                Err((_, Retry::Useful)),
            ) => {
                self.state = State::Reading {
                    notice,
                    buffer,
                    is_retry: true,
                };
            }
            (State::Reading { notice, .. }, Err((failure, _))) => {
                self.give_up(number_of(&notice), Broken::Read(failure));
            }
            (other, _) => self.state = other,
        }
    }

    /// The head of the image, and its one element if it may stand for "no tensor".
    pub(in crate::pipe) fn handle_image(
        &mut self,
        image: Result<(ImageHead, Option<i64>), ImageError>,
    ) {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Read { notice, buffer } => match image {
                Ok((head, element)) => {
                    let is_none = match &notice.note {
                        Some(note) => note.is_none,
                        None => head.has_form_of_none() && element == Some(NONE_VALUE),
                    };
                    self.state = State::Answering {
                        answer: Answer {
                            verdict: Verdict::Taken,
                            id: number_of(&notice),
                        },
                        then: Ok(Delivery {
                            buffer,
                            head,
                            is_none,
                        }),
                    };
                }
                Err(error) => self.give_up(number_of(&notice), Broken::Image(error)),
            },
            other => self.state = other,
        }
    }

    /// The answer is on its way.
    pub(in crate::pipe) fn handle_answered(&mut self) {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Answering { then, .. } => self.conclude(then),
            other => self.state = other,
        }
    }

    /// Hands out the message; the machine is ready for the next one.
    pub(in crate::pipe) fn deliver(&mut self) -> Option<Delivery<B>> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Received(delivery) => Some(delivery),
            other => {
                self.state = other;
                None
            }
        }
    }

    /// Something went wrong with the message under way: it is answered, then the direction ends.
    pub(in crate::pipe) fn handle_failure(&mut self, why: Broken) {
        match &self.state {
            State::Noticed { notice }
            | State::Reading { notice, .. }
            | State::Read { notice, .. } => {
                let id = number_of(notice);
                self.give_up(id, why);
            }
            State::Answering { .. } | State::Received(_) | State::Broken(_) => {}
            State::Idle => self.state = State::Broken(why),
        }
    }

    /// The direction ends, and nobody is there to be answered. A message that is here whole is still
    /// delivered.
    pub(in crate::pipe) fn handle_broken(&mut self, why: Broken) {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Answering { then, .. } => self.conclude(then),
            kept @ (State::Received(_) | State::Broken(_)) => self.state = kept,
            _ => self.state = State::Broken(why),
        }
    }

    fn conclude(&mut self, then: Result<Delivery<B>, Broken>) {
        self.state = match then {
            Ok(delivery) => State::Received(delivery),
            Err(why) => State::Broken(why),
        };
    }

    fn give_up(&mut self, id: Option<u64>, why: Broken) {
        self.state = State::Answering {
            answer: Answer {
                verdict: Verdict::Failed,
                id,
            },
            then: Err(why),
        };
    }
}

/// Whether a failed read is worth another try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pipe) enum Retry {
    Useful,
    Useless,
}

fn number_of(notice: &Notice) -> Option<u64> {
    notice.note.as_ref().map(|note| note.id)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::batch::Reason;
    use crate::pipe::frame::{Dtype, Note};

    const LEN_MAX: u64 = 1_000;

    fn notice(id: Option<u64>, len: u64, is_none: bool) -> Vec<Vec<u8>> {
        let note = id.map(|id| Note {
            session: "a:1".into(),
            id,
            is_none,
        });
        Notice {
            address: 0x1000,
            len,
            note,
        }
        .encode()
    }

    fn head() -> ImageHead {
        ImageHead::new(Dtype::I64, &[1]).unwrap()
    }

    fn failure() -> ReadFailure {
        ReadFailure::Task(Reason::Rejected)
    }

    fn answer(machine: &RecvMachine<u32>) -> Answer {
        match machine.want() {
            RecvWant::Answer(answer) => answer,
            other => panic!("{other:?}"),
        }
    }

    fn read_whole(frames: &[Vec<u8>], element: i64) -> Delivery<u32> {
        let mut machine = RecvMachine::new(LEN_MAX);
        machine.handle_notice(frames);
        machine.handle_room(7);
        machine.handle_read(Ok(()));
        machine.handle_image(Ok((head(), Some(element))));
        assert_eq!(answer(&machine).verdict, Verdict::Taken);
        machine.handle_answered();
        let delivery = machine.deliver().unwrap();
        assert_eq!(machine.want(), RecvWant::Notice);
        delivery
    }

    /// The answer, then the end.
    fn assert_gives_up(machine: &mut RecvMachine<u32>, id: Option<u64>, why: &Broken) {
        let verdict = Verdict::Failed;
        assert_eq!(answer(machine), Answer { verdict, id });
        machine.handle_answered();
        assert_eq!(machine.want(), RecvWant::Nothing(why));
        machine.handle_notice(&notice(None, 80, false));
        machine.handle_broken(Broken::PeerGone);
        assert_eq!(machine.want(), RecvWant::Nothing(why));
    }

    // row: P8.1
    #[test]
    fn a_message_is_read_answered_and_delivered() {
        for id in [None, Some(5)] {
            let mut machine = RecvMachine::new(LEN_MAX);
            assert_eq!(machine.want(), RecvWant::Notice);
            machine.handle_notice(&notice(id, 80, false));
            assert_eq!(machine.want(), RecvWant::Room { len: 80 });
            machine.handle_room(7);
            let session = id.map(|_| "a:1");
            let read = RecvWant::Read {
                session,
                address: 0x1000,
                len: 80,
                is_retry: false,
            };
            assert_eq!(machine.want(), read);
            assert_eq!(machine.buffer(), Some(&7));
            machine.handle_read(Ok(()));
            assert_eq!(machine.want(), RecvWant::Image { len: 80 });
            machine.handle_image(Ok((head(), Some(1))));
            let verdict = Verdict::Taken;
            assert_eq!(answer(&machine), Answer { verdict, id });
            machine.handle_answered();
            assert_eq!(machine.want(), RecvWant::Deliver);
            let delivery = machine.deliver().unwrap();
            assert_eq!((delivery.buffer, delivery.is_none), (7, false));
            assert_eq!(machine.peer_uses_numbers(), id.is_some());
        }
    }

    // row: P7.5
    #[test]
    fn a_peer_of_our_kind_says_whether_there_is_a_tensor() {
        assert!(read_whole(&notice(None, 80, false), NONE_VALUE).is_none);
        assert!(!read_whole(&notice(None, 80, false), NONE_VALUE + 1).is_none);
        assert!(!read_whole(&notice(Some(1), 80, false), NONE_VALUE).is_none);
        assert!(read_whole(&notice(Some(1), 80, true), 0).is_none);
    }

    // row: P7.3
    #[test]
    fn a_failed_read_is_tried_once_more_then_answered() {
        let mut machine = RecvMachine::new(LEN_MAX);
        machine.handle_notice(&notice(Some(3), 80, false));
        machine.handle_room(7);
        machine.handle_read(Err((failure(), Retry::Useful)));
        assert!(matches!(
            machine.want(),
            RecvWant::Read { is_retry: true, .. }
        ));
        machine.handle_read(Err((failure(), Retry::Useful)));
        assert_eq!(machine.buffer(), None);
        assert_gives_up(&mut machine, Some(3), &Broken::Read(failure()));
    }

    // row: P7.3
    #[test]
    fn a_read_that_cannot_succeed_is_not_tried_again() {
        let mut machine = RecvMachine::new(LEN_MAX);
        machine.handle_notice(&notice(None, 80, false));
        machine.handle_room(7);
        machine.handle_read(Err((failure(), Retry::Useless)));
        assert_gives_up(&mut machine, None, &Broken::Read(failure()));
    }

    // row: P7.3
    #[test]
    fn every_failure_is_answered_before_the_direction_ends() {
        let why = Broken::ReadTimeout { timeout_ms: 5 };
        for steps in 0..3 {
            let mut machine = RecvMachine::new(LEN_MAX);
            machine.handle_notice(&notice(Some(9), 80, false));
            if steps > 0 {
                machine.handle_room(7);
            }
            if steps > 1 {
                machine.handle_read(Ok(()));
            }
            machine.handle_failure(why.clone());
            assert_gives_up(&mut machine, Some(9), &why);
        }
        let mut machine = RecvMachine::new(LEN_MAX);
        machine.handle_notice(&notice(Some(9), 80, false));
        machine.handle_room(7);
        machine.handle_read(Ok(()));
        machine.handle_image(Err(ImageError::Header));
        assert_gives_up(&mut machine, Some(9), &Broken::Image(ImageError::Header));
    }

    // row: P7.11
    #[test]
    fn a_length_beyond_the_limit_is_answered_and_never_reserved() {
        for len in [LEN_MAX + 1, 1 << 60] {
            let mut machine = RecvMachine::new(LEN_MAX);
            machine.handle_notice(&notice(Some(4), len, false));
            let max = LEN_MAX;
            assert_gives_up(&mut machine, Some(4), &Broken::TooLong { len, max });
        }
        let mut machine = RecvMachine::<u32>::new(LEN_MAX);
        machine.handle_notice(&notice(None, LEN_MAX, false));
        assert_eq!(machine.want(), RecvWant::Room { len: LEN_MAX });
    }

    // row: P7.12
    #[test]
    fn a_notice_of_another_form_is_answered_and_ends_the_direction() {
        let bad: [(&[usize], NoticeError); 3] = [
            (&[8], NoticeError::FrameCount { count: 1 }),
            (&[8, 7], NoticeError::FrameLen { index: 1, len: 7 }),
            (&[8, 8, 0], NoticeError::Note),
        ];
        for (lens, error) in bad {
            let mut machine = RecvMachine::new(LEN_MAX);
            let frames: Vec<Vec<u8>> = lens.iter().map(|len| vec![0; *len]).collect();
            machine.handle_notice(&frames);
            assert_gives_up(&mut machine, None, &Broken::Notice(error));
        }
    }

    // row: P7.1, P7.16
    #[test]
    fn a_lost_notice_or_one_of_another_run_of_the_peer_is_noticed() {
        for (first, second) in [(5, 7), (5, 5), (5, 0), (u64::MAX, 1)] {
            let mut machine = RecvMachine::new(LEN_MAX);
            machine.handle_notice(&notice(Some(first), 80, false));
            machine.handle_room(7);
            machine.handle_read(Ok(()));
            machine.handle_image(Ok((head(), None)));
            machine.handle_answered();
            assert!(machine.deliver().is_some());
            machine.handle_notice(&notice(Some(second), 80, false));
            let error = NoticeError::Sequence {
                id: second,
                expected: first.wrapping_add(1),
            };
            assert_gives_up(&mut machine, None, &Broken::Notice(error));
        }
    }

    // row: P7.7
    #[test]
    fn what_is_here_whole_is_delivered_though_the_peer_is_gone() {
        let mut machine = RecvMachine::new(LEN_MAX);
        machine.handle_notice(&notice(None, 80, false));
        machine.handle_room(7);
        machine.handle_read(Ok(()));
        machine.handle_image(Ok((head(), None)));
        machine.handle_broken(Broken::PeerGone);
        assert_eq!(machine.want(), RecvWant::Deliver);
        machine.handle_broken(Broken::PeerGone);
        assert!(machine.deliver().is_some());
        machine.handle_broken(Broken::PeerGone);
        assert_eq!(machine.want(), RecvWant::Nothing(&Broken::PeerGone));
    }

    // row: P7.7
    #[test]
    fn without_a_peer_there_is_no_answer() {
        for steps in 0..3 {
            let mut machine = RecvMachine::<u32>::new(LEN_MAX);
            if steps > 0 {
                machine.handle_notice(&notice(None, 80, false));
            }
            if steps > 1 {
                machine.handle_room(7);
            }
            machine.handle_broken(Broken::PeerRestarted);
            assert_eq!(machine.want(), RecvWant::Nothing(&Broken::PeerRestarted));
            assert_eq!(machine.buffer(), None);
        }
    }

    proptest! {
        // row: P7.3, P8.2, P8.4
        #[test]
        fn property_every_notice_is_answered_once_and_no_buffer_is_lost(
            steps in prop::collection::vec((0..9_u8, any::<bool>(), 0..3_u64), 0..80), numbered: bool,
        ) {
            let mut machine = RecvMachine::<u32>::new(LEN_MAX);
            let (mut noticed, mut answered, mut given, mut delivered) = (0_u64, 0_u64, 0, 0);
            let mut peer_gone = false;
            for (step, good, jump) in steps {
                match step {
                    0 | 1 if machine.want() == RecvWant::Notice => {
                        let id = numbered.then_some(noticed + if good { 0 } else { jump });
                        machine.handle_notice(&notice(id, 80 + 500 * jump, false));
                        noticed += 1;
                    }
                    2 if matches!(machine.want(), RecvWant::Room { .. }) => {
                        machine.handle_room(given);
                        given += 1;
                    }
                    3 => machine.handle_read(if good { Ok(()) } else { Err((failure(), Retry::Useful)) }),
                    4 => machine.handle_image(if good { Ok((head(), None)) } else { Err(ImageError::Shape) }),
                    5 | 6 if matches!(machine.want(), RecvWant::Answer(_)) => {
                        machine.handle_answered();
                        answered += 1;
                    }
                    7 => delivered += u64::from(machine.deliver().is_some()),
                    8 if jump == 0 => {
                        peer_gone = true;
                        // Nobody waits for this one any more.
                        answered += u64::from(matches!(machine.want(), RecvWant::Answer(_)));
                        machine.handle_broken(Broken::PeerGone);
                    }
                    _ => {}
                }
                prop_assert!(answered <= noticed && delivered <= answered);
                match machine.want() {
                    RecvWant::Notice => prop_assert!(answered == noticed || peer_gone),
                    RecvWant::Nothing(_) => prop_assert!(peer_gone || answered == noticed),
                    RecvWant::Deliver => {}
                    _ => prop_assert_eq!(answered + 1, noticed),
                }
                let holds = machine.buffer().is_some();
                let reads = matches!(machine.want(), RecvWant::Read { .. } | RecvWant::Image { .. });
                prop_assert_eq!(holds, reads);
            }
        }
    }
}
