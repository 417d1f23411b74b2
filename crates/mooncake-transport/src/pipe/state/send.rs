//! The sending direction: which buffers wait for an answer, and what an answer means.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::Numbers;
use crate::pipe::error::Broken;
use crate::pipe::frame::{Answer, AnswerError, Note, Notice, Verdict};

/// What bounds a [`SendMachine`].
#[derive(Clone, Copy, Debug)]
pub(in crate::pipe) struct SendLimits {
    /// Notices without an answer.
    pub(in crate::pipe) outstanding_max: usize,
    /// Time for each answer, once it is the next that is due.
    pub(in crate::pipe) answer_timeout: Duration,
}

/// Buffers of type `B` that were announced to the peer, oldest first.
pub(in crate::pipe) struct SendMachine<B> {
    limits: SendLimits,
    /// What the third frame says; none for peers that insist on two.
    session: Option<String>,
    next_id: u64,
    waiting: VecDeque<Outstanding<B>>,
    /// When the oldest became the oldest.
    due_since: Option<Instant>,
    peer: Numbers,
    broken: Option<Broken>,
}

struct Outstanding<B> {
    id: u64,
    buffer: B,
}

impl<B> SendMachine<B> {
    /// `first_id` is the number of the first notice; two runs of one peer should not begin alike.
    pub(in crate::pipe) fn new(limits: SendLimits, session: Option<String>, first_id: u64) -> Self {
        Self {
            limits,
            session,
            next_id: first_id,
            waiting: VecDeque::new(),
            due_since: None,
            peer: Numbers::Unheard,
            broken: None,
        }
    }

    pub(in crate::pipe) fn broken(&self) -> Option<&Broken> {
        self.broken.as_ref()
    }

    pub(in crate::pipe) fn outstanding(&self) -> usize {
        self.waiting.len()
    }

    /// Whether one more notice may be sent.
    pub(in crate::pipe) fn has_room(&self) -> bool {
        self.waiting.len() < self.limits.outstanding_max
    }

    /// Whether the peer's answers have shown that it reads third frames.
    pub(in crate::pipe) fn peer_uses_numbers(&self) -> bool {
        self.peer == Numbers::Used
    }

    /// The notice to send next for an image. It counts once [`handle_sent`](Self::handle_sent) says so.
    pub(in crate::pipe) fn notice(&self, address: u64, len: u64, is_none: bool) -> Notice {
        let note = self.session.as_ref().map(|session| Note {
            session: session.clone(),
            id: self.next_id,
            is_none,
        });
        Notice { address, len, note }
    }

    /// The notice for `buffer` is on its way; from now on the peer may read the buffer.
    pub(in crate::pipe) fn handle_sent(&mut self, buffer: B, now: Instant) {
        let id = self.next_id;
        // A number that comes round again is far from any that still waits.
        self.next_id = id.wrapping_add(1);
        self.waiting.push_back(Outstanding { id, buffer });
        self.due_since.get_or_insert(now);
    }

    /// The peer has answered; returns the buffer that it does not read any more.
    pub(in crate::pipe) fn handle_answer(&mut self, frames: &[Vec<u8>], now: Instant) -> Option<B> {
        if self.broken.is_some() {
            // Whatever it means: with one answer misunderstood, none can be matched any more.
            return None;
        }
        match self.match_answer(frames) {
            Ok(verdict) => {
                let answered = self.waiting.pop_front()?;
                self.due_since = (!self.waiting.is_empty()).then_some(now);
                if verdict == Verdict::Failed {
                    self.handle_broken(Broken::PeerFailed);
                }
                Some(answered.buffer)
            }
            Err(error) => {
                self.handle_broken(Broken::Answer(error));
                None
            }
        }
    }

    /// Checks that the answer is the one that is due.
    fn match_answer(&mut self, frames: &[Vec<u8>]) -> Result<Verdict, AnswerError> {
        let Answer { verdict, id } = Answer::decode(frames)?;
        let expected = self.waiting.front().ok_or(AnswerError::Unexpected)?.id;
        if id.is_some() && self.session.is_none() {
            return Err(AnswerError::NoNumber);
        }
        match id {
            Some(id) if id != expected => return Err(AnswerError::Sequence { id, expected }),
            // A receiver that could not read a notice cannot name it.
            None if verdict == Verdict::Failed => return Ok(verdict),
            _ => {}
        }
        if self.peer.note(id.is_some()) {
            Ok(verdict)
        } else {
            Err(AnswerError::Mixed)
        }
    }

    /// When [`handle_time`](Self::handle_time) has something to say.
    pub(in crate::pipe) fn deadline(&self) -> Option<Instant> {
        if self.broken.is_some() {
            return None;
        }
        self.due_since?.checked_add(self.limits.answer_timeout)
    }

    pub(in crate::pipe) fn handle_time(&mut self, now: Instant) {
        if self.deadline().is_some_and(|deadline| deadline <= now) {
            let timeout = self.limits.answer_timeout.as_millis();
            self.handle_broken(Broken::NoAnswer {
                timeout_ms: u64::try_from(timeout).unwrap_or(u64::MAX),
            });
        }
    }

    /// The direction has ended; the first reason stays.
    pub(in crate::pipe) fn handle_broken(&mut self, why: Broken) {
        self.broken.get_or_insert(why);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn machine(session: Option<&str>) -> SendMachine<u32> {
        let limits = SendLimits {
            outstanding_max: 4,
            answer_timeout: Duration::from_secs(10),
        };
        SendMachine::new(limits, session.map(str::to_owned), 100)
    }

    fn with_sent(session: Option<&str>, count: u32) -> SendMachine<u32> {
        let mut machine = machine(session);
        for buffer in 0..count {
            machine.handle_sent(buffer, Instant::now());
        }
        machine
    }

    fn answer(verdict: Verdict, id: Option<u64>) -> Vec<Vec<u8>> {
        Answer { verdict, id }.encode()
    }

    fn ack(id: Option<u64>) -> Vec<Vec<u8>> {
        answer(Verdict::Taken, id)
    }

    fn broken(machine: &SendMachine<u32>) -> AnswerError {
        match machine.broken() {
            Some(Broken::Answer(error)) => *error,
            other => panic!("{other:?}"),
        }
    }

    // row: P7.1
    #[test]
    fn answers_free_the_buffers_in_order() {
        for session in [None, Some("a:1")] {
            let mut machine = with_sent(session, 3);
            for buffer in 0..3 {
                let id = session.map(|_| 100 + u64::from(buffer));
                let freed = machine.handle_answer(&ack(id), Instant::now());
                assert_eq!(freed, Some(buffer));
            }
            assert_eq!(machine.outstanding(), 0);
            assert_eq!(machine.broken(), None);
            assert_eq!(machine.deadline(), None);
        }
    }

    // row: P7.1
    #[test]
    fn one_answer_too_many_ends_the_direction() {
        let mut machine = with_sent(None, 1);
        assert_eq!(machine.handle_answer(&ack(None), Instant::now()), Some(0));
        assert_eq!(machine.handle_answer(&ack(None), Instant::now()), None);
        assert_eq!(broken(&machine), AnswerError::Unexpected);
        // From here on nothing is freed, whatever comes.
        machine.handle_sent(7, Instant::now());
        assert_eq!(machine.handle_answer(&ack(None), Instant::now()), None);
        assert_eq!(machine.outstanding(), 1);
    }

    // row: P7.1
    #[test]
    fn an_answer_to_another_notice_frees_nothing() {
        for id in [99, 101, 102] {
            let mut machine = with_sent(Some("a:1"), 2);
            assert_eq!(machine.handle_answer(&ack(Some(id)), Instant::now()), None);
            let expected = 100;
            assert_eq!(broken(&machine), AnswerError::Sequence { id, expected });
            assert_eq!(machine.outstanding(), 2);
        }
    }

    // row: P7.1
    #[test]
    fn a_peer_numbers_all_its_answers_or_none() {
        let mut machine = with_sent(Some("a:1"), 2);
        assert!(
            machine
                .handle_answer(&ack(Some(100)), Instant::now())
                .is_some()
        );
        assert!(machine.peer_uses_numbers());
        assert_eq!(machine.handle_answer(&ack(None), Instant::now()), None);
        assert_eq!(broken(&machine), AnswerError::Mixed);

        let mut machine = with_sent(Some("a:1"), 2);
        assert!(machine.handle_answer(&ack(None), Instant::now()).is_some());
        assert!(!machine.peer_uses_numbers());
        assert_eq!(machine.handle_answer(&ack(Some(101)), Instant::now()), None);
        assert_eq!(broken(&machine), AnswerError::Mixed);

        let mut machine = with_sent(None, 1);
        assert_eq!(machine.handle_answer(&ack(Some(100)), Instant::now()), None);
        assert_eq!(broken(&machine), AnswerError::NoNumber);
    }

    // row: P7.2
    #[test]
    fn an_answer_that_is_none_keeps_the_buffer() {
        for frames in [
            vec![b"ACk".to_vec()],
            vec![Vec::new()],
            vec![b"ACK".to_vec(), vec![0; 7]],
            vec![b"ACK".to_vec(); 3],
            Vec::new(),
        ] {
            let mut machine = with_sent(Some("a:1"), 1);
            assert_eq!(machine.handle_answer(&frames, Instant::now()), None);
            broken(&machine);
            assert_eq!(machine.outstanding(), 1, "{frames:?}");
        }
    }

    // row: P7.3
    #[test]
    fn a_peer_that_gave_up_gives_the_buffer_back_and_ends_the_direction() {
        for id in [None, Some(100)] {
            let mut machine = with_sent(Some("a:1"), 2);
            let freed = machine.handle_answer(&answer(Verdict::Failed, id), Instant::now());
            assert_eq!(freed, Some(0));
            assert_eq!(machine.broken(), Some(&Broken::PeerFailed));
            assert_eq!(machine.outstanding(), 1);
        }
    }

    // row: P7.7
    #[test]
    fn an_answer_that_does_not_come_ends_the_direction_and_keeps_the_buffers() {
        let mut machine = machine(None);
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!(machine.deadline(), None);
        machine.handle_time(at(1_000));
        machine.handle_sent(0, at(1_000));
        machine.handle_sent(1, at(1_005));
        assert_eq!(machine.deadline(), Some(at(1_010)));
        // Each answer has its own time, counted from when it is the next.
        machine.handle_time(at(1_009));
        assert!(machine.handle_answer(&ack(None), at(1_009)).is_some());
        assert_eq!(machine.deadline(), Some(at(1_019)));
        machine.handle_time(at(1_019));
        assert_eq!(
            machine.broken(),
            Some(&Broken::NoAnswer { timeout_ms: 10_000 })
        );
        assert_eq!(machine.outstanding(), 1);
        machine.handle_broken(Broken::PeerGone);
        assert!(matches!(machine.broken(), Some(Broken::NoAnswer { .. })));
    }

    // row: P7.10
    #[test]
    fn notices_without_an_answer_are_bounded() {
        let mut machine = with_sent(None, 3);
        assert!(machine.has_room());
        machine.handle_sent(3, Instant::now());
        assert!(!machine.has_room());
        assert!(machine.handle_answer(&ack(None), Instant::now()).is_some());
        assert!(machine.has_room());
    }

    #[test]
    fn notices_are_numbered_one_after_the_other() {
        let mut machine = machine(Some("a:1"));
        let id = |machine: &SendMachine<u32>| machine.notice(1, 2, false).note.unwrap().id;
        assert_eq!((id(&machine), id(&machine)), (100, 100));
        machine.handle_sent(0, Instant::now());
        assert_eq!(id(&machine), 101);
        machine.next_id = u64::MAX;
        machine.handle_sent(1, Instant::now());
        assert_eq!(id(&machine), 0);
        assert_eq!(with_sent(None, 1).notice(1, 2, true).note, None);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Send,
        Answer {
            offset: u64,
            numbered: bool,
            failed: bool,
        },
        Noise(Vec<Vec<u8>>),
        Time(u64),
        Gone,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => Just(Step::Send),
            4 => (prop_oneof![8 => Just(0), 1 => 0..3_u64], prop::bool::weighted(0.9), prop::bool::weighted(0.1))
                .prop_map(|(offset, numbered, failed)| Step::Answer { offset, numbered, failed }),
            1 => prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..4).prop_map(Step::Noise),
            1 => (0..20_u64).prop_map(Step::Time),
            1 => Just(Step::Gone),
        ]
    }

    proptest! {
        // row: P7.1, P7.2, P8.2, P8.4
        #[test]
        fn property_a_buffer_comes_back_only_by_its_own_answer(
            steps in prop::collection::vec(step(), 0..60), numbered: bool,
        ) {
            let mut machine = machine(numbered.then_some("a:1"));
            let mut now = Instant::now();
            let mut sent = 0_u32;
            let mut freed = 0_u32;
            for step in steps {
                let was_broken = machine.broken().cloned();
                match step {
                    Step::Send if machine.has_room() => {
                        machine.handle_sent(sent, now);
                        sent += 1;
                    }
                    Step::Send => prop_assert_eq!(machine.outstanding(), 4),
                    Step::Answer { offset, numbered, failed } => {
                        let verdict = if failed { Verdict::Failed } else { Verdict::Taken };
                        let id = numbered.then_some(100 + u64::from(freed) + offset);
                        if let Some(buffer) = machine.handle_answer(&answer(verdict, id), now) {
                            // The oldest, once, by an answer of its own number or of none.
                            prop_assert_eq!(buffer, freed);
                            prop_assert!(offset == 0 || id.is_none());
                            prop_assert_eq!(&was_broken, &None);
                            freed += 1;
                        }
                    }
                    Step::Noise(frames) => {
                        if machine.handle_answer(&frames, now).is_some() {
                            prop_assert!(Answer::decode(&frames).is_ok());
                            freed += 1;
                        }
                    }
                    Step::Time(seconds) => {
                        now += Duration::from_secs(seconds);
                        machine.handle_time(now);
                    }
                    Step::Gone => machine.handle_broken(Broken::PeerGone),
                }
                prop_assert_eq!(machine.outstanding() as u32, sent - freed);
                if was_broken.is_some() {
                    prop_assert_eq!(machine.broken().cloned(), was_broken);
                }
            }
        }
    }
}
