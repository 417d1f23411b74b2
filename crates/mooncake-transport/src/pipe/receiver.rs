//! The receiving direction: takes notices, reads images, and answers.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use slab_memory::{CopyError, HostSlab, Memory};

use super::buffers::{Buffer, Buffers};
use super::error::{Broken, ReadFailure, RecvError, SocketReason, Waiting};
use super::frame::{Answer, Dtype, ImageError, ImageHead, head_len};
use super::sender::deadline_after;
use super::socket::{Incoming, Outgoing, wait, wait_to_send};
use super::state::{Delivery, RecvMachine, RecvWant, Retry};
use crate::batch::{Batch, Remote, Task};
use crate::engine::Engine;
use crate::registration::Registration;
use crate::segment::Segment;
use crate::wire::data::Op;

/// What was received.
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "the peer sends a tensor or none")]
pub enum Message {
    /// A tensor.
    Tensor(ReceivedTensor),
    /// No tensor, in the place of one.
    NoTensor,
}

/// A tensor, where it was read to. It occupies its bytes until it is dropped.
#[derive(Debug)]
pub struct ReceivedTensor {
    head: ImageHead,
    buffer: Arc<Buffer>,
}

impl ReceivedTensor {
    /// Returns what an element is.
    pub fn dtype(&self) -> Dtype {
        self.head.dtype
    }

    /// Returns the dimensions.
    pub fn shape(&self) -> &[u64] {
        &self.head.shape
    }

    /// Returns how many bytes the elements have together.
    pub fn len(&self) -> u64 {
        self.head.data_len
    }

    /// Says whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.head.data_len == 0
    }

    /// Copies bytes out, from byte `offset` of the elements on.
    ///
    /// # Errors
    /// [`CopyError::OutOfBounds`], counted from the start of the elements, with nothing copied.
    pub fn copy_out(&self, offset: u64, target: &mut [u8]) -> Result<(), CopyError> {
        let len = target.len() as u64;
        let is_inside = offset
            .checked_add(len)
            .is_some_and(|end| end <= self.head.data_len);
        if !is_inside {
            return Err(CopyError::OutOfBounds {
                offset,
                len,
                memory_len: self.head.data_len,
            });
        }
        let start = self.buffer.offset() + self.head.data_start;
        self.buffer.slab().copy_out(start + offset, target)
    }

    /// Copies all bytes out.
    ///
    /// # Errors
    /// [`CopyError`], which host memory does not make.
    pub fn to_vec(&self) -> Result<Vec<u8>, CopyError> {
        let len = usize::try_from(self.head.data_len).map_err(|_| CopyError::OutOfBounds {
            offset: 0,
            len: self.head.data_len,
            memory_len: usize::MAX as u64,
        })?;
        let mut bytes = vec![0; len];
        self.copy_out(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Returns the slab that the elements are in, for whoever moves them on without a copy.
    pub fn slab(&self) -> &Arc<HostSlab> {
        self.buffer.slab()
    }

    /// Returns where in the slab they are. The bytes are this value's for as long as it exists.
    pub fn range(&self) -> Range<u64> {
        let start = self.buffer.offset() + self.head.data_start;
        start..start + self.head.data_len
    }
}

/// The receiving direction of a pipe. It works on its callers' threads: the peer's tensors stay at the
/// peer until [`recv`](Self::recv) fetches them.
pub struct PipeReceiver {
    // Dropped in this order: no answers any more, then the engine, then the memory.
    notices: Incoming,
    answers: Outgoing,
    /// The read under way; its end is the engine's.
    reading: Option<Reading>,
    machine: RecvMachine<Arc<Buffer>>,
    engine: Arc<dyn Engine>,
    _registration: Registration,
    buffers: Buffers,
    /// The name of the peer's engine, where the notice does not say it.
    peer_session: String,
    segment: Option<Segment>,
    read_timeout: Duration,
    peer_is_new: Arc<AtomicBool>,
}

struct Reading {
    batch: Batch,
    deadline: Instant,
}

/// Everything a [`PipeReceiver`] is made of.
pub(super) struct ReceiverParts {
    pub(super) notices: Incoming,
    pub(super) answers: Outgoing,
    pub(super) engine: Arc<dyn Engine>,
    pub(super) registration: Registration,
    pub(super) buffers: Buffers,
    pub(super) peer_session: String,
    pub(super) read_timeout: Duration,
    pub(super) peer_is_new: Arc<AtomicBool>,
}

impl PipeReceiver {
    pub(super) fn new(parts: ReceiverParts) -> Self {
        Self {
            notices: parts.notices,
            answers: parts.answers,
            reading: None,
            machine: RecvMachine::new(parts.buffers.usable()),
            engine: parts.engine,
            _registration: parts.registration,
            buffers: parts.buffers,
            peer_session: parts.peer_session,
            segment: None,
            read_timeout: parts.read_timeout,
            peer_is_new: parts.peer_is_new,
        }
    }

    /// Waits for the next tensor, reads it from the peer, and answers.
    ///
    /// The first call with a peer, and the one after a failed read, may last longer by an exchange
    /// with the peer's engine, `PipeOptions::read_timeout` at most with the native one.
    ///
    /// # Errors
    /// [`RecvError::TimedOut`]: nothing is lost, and the next call goes on. With
    /// [`Waiting::Room`](super::Waiting::Room), drop tensors received earlier.
    /// [`RecvError::Broken`] if this direction has ended: the first reason, every time. The peer was
    /// told, if it could be.
    pub fn recv(&mut self, timeout: Duration) -> Result<Message, RecvError> {
        let deadline = deadline_after(timeout);
        loop {
            match self.step(deadline) {
                Ok(Some(message)) => return Ok(message),
                Ok(None) => {}
                Err(Stop::TimedOut(what)) => return Err(RecvError::TimedOut(what)),
                Err(Stop::Socket(why)) => self.machine.handle_broken(Broken::Socket(why)),
            }
            if let RecvWant::Nothing(why) = self.machine.want() {
                return Err(RecvError::Broken(why.clone()));
            }
        }
    }

    /// Returns how many bytes of buffers are in use: tensors received and not dropped.
    pub fn bytes_in_use(&self) -> u64 {
        self.buffers.in_use()
    }

    /// Does what the machine wants next.
    fn step(&mut self, deadline: Instant) -> Result<Option<Message>, Stop> {
        match self.machine.want() {
            RecvWant::Notice => self.await_notice(deadline)?,
            RecvWant::Room { len } => match self.buffers.reserve_until(len, Some(deadline)) {
                Some(buffer) => self.machine.handle_room(Arc::new(buffer)),
                None => return Err(Stop::TimedOut(Waiting::Room)),
            },
            RecvWant::Read { .. } => self.read(deadline)?,
            RecvWant::Image { len } => {
                // A peer that came back while its memory was read may have left other bytes there.
                if self.notices.link()?.is_another() {
                    self.machine.handle_broken(Broken::PeerRestarted);
                } else {
                    self.check_image(len);
                }
            }
            RecvWant::Answer(answer) => self.answer(answer, deadline)?,
            RecvWant::Deliver => return Ok(self.machine.deliver().map(message)),
            RecvWant::Nothing(_) => {}
        }
        Ok(None)
    }

    fn await_notice(&mut self, deadline: Instant) -> Result<(), Stop> {
        // Asked before the messages are read, so that none that came before the end is missed.
        let link = self.notices.link()?;
        if link.is_another() {
            self.machine.handle_broken(Broken::PeerRestarted);
            return Ok(());
        }
        if let Some(frames) = self.notices.try_receive()? {
            self.machine.handle_notice(&frames);
            if self.machine.peer_uses_numbers() {
                self.peer_is_new.store(true, Ordering::Relaxed);
            }
            return Ok(());
        }
        if link.is_gone() {
            self.machine.handle_broken(Broken::PeerGone);
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(Stop::TimedOut(Waiting::Tensor));
        }
        Ok(wait(&self.notices, None, deadline)?)
    }

    fn read(&mut self, deadline: Instant) -> Result<(), Stop> {
        let reading = match self.reading.take() {
            Some(reading) => reading,
            None => match self.begin_read() {
                Ok(batch) => Reading {
                    batch,
                    deadline: deadline_after(self.read_timeout),
                },
                Err(failure) => {
                    self.machine.handle_read(Err((failure, Retry::Useful)));
                    return Ok(());
                }
            },
        };
        let until = deadline.min(reading.deadline);
        match reading.batch.wait(Some(until)) {
            Some(report) => self.machine.handle_read(match report.first_failure() {
                None => Ok(()),
                Some((_, Remote::Ended(reason))) => {
                    Err((ReadFailure::Task(reason.clone()), Retry::Useful))
                }
                // The engine has waited long enough; so would a second try.
                Some((_, remote)) => {
                    let reason = remote.reason().cloned();
                    let reason = reason.unwrap_or(crate::batch::Reason::Lost);
                    Err((ReadFailure::Task(reason), Retry::Useless))
                }
            }),
            None if Instant::now() >= reading.deadline => {
                // The engine may still write into the buffer, and holds it until it does not.
                let timeout = self.read_timeout.as_millis();
                self.machine.handle_failure(Broken::ReadTimeout {
                    timeout_ms: u64::try_from(timeout).unwrap_or(u64::MAX),
                });
            }
            None => {
                self.reading = Some(reading);
                return Err(Stop::TimedOut(Waiting::Bytes));
            }
        }
        Ok(())
    }

    fn begin_read(&mut self) -> Result<Batch, ReadFailure> {
        let RecvWant::Read {
            session,
            address,
            is_retry,
            ..
        } = self.machine.want()
        else {
            return Err(ReadFailure::Task(crate::batch::Reason::Lost));
        };
        let Some(buffer) = self.machine.buffer().map(Arc::clone) else {
            return Err(ReadFailure::Task(crate::batch::Reason::Lost));
        };
        let session = session.unwrap_or(&self.peer_session);
        let known = self
            .segment
            .take()
            .filter(|segment| !is_retry && segment.name() == session);
        let segment = match known {
            Some(segment) => segment,
            // The last handle is gone by now, so the engine asks the peer anew where its memory is.
            None => self
                .engine
                .open_segment(session)
                .map_err(ReadFailure::Open)?,
        };
        let memory: Arc<dyn Memory> = buffer.slab().clone();
        let start = buffer.offset();
        let task = Task {
            op: Op::Read,
            segment: segment.clone(),
            remote: address,
            memory,
            range: start..start + buffer.len(),
            hold: Box::new(buffer),
        };
        self.segment = Some(segment);
        self.engine
            .submit(vec![task])
            .map_err(|refused| ReadFailure::Submit(refused.cause))
    }

    /// Reads head and, where it could stand for "no tensor", the element, in place.
    fn check_image(&mut self, len: u64) {
        let Some(buffer) = self.machine.buffer().map(Arc::clone) else {
            return;
        };
        match read_head(&buffer, len) {
            Ok(image) => self.machine.handle_image(image),
            Err(error) => self.machine.handle_failure(Broken::Copy(error)),
        }
    }

    fn answer(&mut self, answer: Answer, deadline: Instant) -> Result<(), Stop> {
        if self.answers.try_send(&answer.encode())? {
            self.machine.handle_answered();
            return Ok(());
        }
        let link = self.notices.link()?;
        if link.is_another() {
            self.machine.handle_broken(Broken::PeerRestarted);
            return Ok(());
        }
        if link.is_gone() {
            // Nobody waits for it.
            self.machine.handle_broken(Broken::PeerGone);
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(Stop::TimedOut(Waiting::Peer));
        }
        Ok(wait_to_send(&self.notices, &self.answers, deadline)?)
    }
}

/// Why a step did not lead to the next.
enum Stop {
    TimedOut(Waiting),
    Socket(SocketReason),
}

impl From<SocketReason> for Stop {
    fn from(why: SocketReason) -> Self {
        Self::Socket(why)
    }
}

fn message(delivery: Delivery<Arc<Buffer>>) -> Message {
    if delivery.is_none {
        Message::NoTensor
    } else {
        Message::Tensor(ReceivedTensor {
            head: delivery.head,
            buffer: delivery.buffer,
        })
    }
}

type Image = Result<(ImageHead, Option<i64>), ImageError>;

fn read_head(buffer: &Buffer, len: u64) -> Result<Image, CopyError> {
    let slab = buffer.slab();
    let mut prefix = [0; 8];
    if len < prefix.len() as u64 {
        return Ok(Err(ImageError::Truncated {
            len,
            header_end: prefix.len() as u64,
        }));
    }
    slab.copy_out(buffer.offset(), &mut prefix)?;
    let header_len = match head_len(prefix, len) {
        Ok(header_len) => header_len,
        Err(error) => return Ok(Err(error)),
    };
    let mut header = vec![0; header_len];
    slab.copy_out(buffer.offset() + prefix.len() as u64, &mut header)?;
    let head = match ImageHead::decode(&header, len) {
        Ok(head) => head,
        Err(error) => return Ok(Err(error)),
    };
    let mut element = None;
    if head.has_form_of_none() {
        let mut bytes = [0; 8];
        slab.copy_out(buffer.offset() + head.data_start, &mut bytes)?;
        element = Some(i64::from_le_bytes(bytes));
    }
    Ok(Ok((head, element)))
}

impl std::fmt::Debug for PipeReceiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PipeReceiver")
            .field("want", &self.machine.want())
            .finish_non_exhaustive()
    }
}
