//! The sending direction: builds images, announces them, and takes answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::buffers::{Buffer, Buffers};
use super::error::{Broken, SendError, SocketReason, Waiting};
use super::frame::image::{data_len, looks_like_none};
use super::frame::{Dtype, ImageError, ImageHead, none_image};
use super::socket::{Incoming, Outgoing, wait};
use super::state::SendMachine;
use crate::engine::Engine;
use crate::registration::Registration;

/// A tensor to be sent: contiguous bytes, row by row, each element little-endian.
#[derive(Clone, Copy, Debug)]
#[expect(
    clippy::exhaustive_structs,
    reason = "callers make it, and a further member is theirs to think about"
)]
pub struct Tensor<'a> {
    /// What an element is.
    pub dtype: Dtype,
    /// The dimensions.
    pub shape: &'a [u64],
    /// The bytes, as many as type and shape say.
    pub bytes: &'a [u8],
}

/// The sending direction of a pipe.
///
/// It works on its callers' threads: answers are taken by [`send`](Self::send), [`poll`](Self::poll) and
/// [`flush`](Self::flush). Dropping it without a flush gives up what is not answered yet.
pub struct PipeSender {
    // Dropped in this order: nobody is told of buffers any more, then nobody reads them, then they go.
    notices: Outgoing,
    answers: Incoming,
    _registration: Registration,
    machine: SendMachine<Buffer>,
    buffers: Buffers,
    /// Set by either direction once the peer has shown that it is of our kind.
    peer_is_new: Arc<AtomicBool>,
    _engine: Arc<dyn Engine>,
}

impl PipeSender {
    pub(super) fn new(
        notices: Outgoing,
        answers: Incoming,
        registration: Registration,
        machine: SendMachine<Buffer>,
        buffers: Buffers,
        peer_is_new: Arc<AtomicBool>,
        engine: Arc<dyn Engine>,
    ) -> Self {
        Self {
            notices,
            answers,
            _registration: registration,
            machine,
            buffers,
            peer_is_new,
            _engine: engine,
        }
    }

    /// Copies a tensor into a buffer and tells the peer, which then reads it when it likes.
    ///
    /// It waits for the peer to connect and for room: earlier tensors occupy their buffers until the
    /// peer has answered them. That the peer has the tensor is known after [`flush`](Self::flush).
    ///
    /// # Errors
    /// [`SendError`]. After [`SendError::Broken`] nothing can be sent any more; after any other error
    /// nothing was sent, and the pipe works on.
    pub fn send(&mut self, tensor: Tensor<'_>, timeout: Duration) -> Result<(), SendError> {
        self.poll()?;
        let Tensor {
            dtype,
            shape,
            bytes,
        } = tensor;
        let need = data_len(dtype, shape).map_err(SendError::Tensor)?;
        let len = bytes.len() as u64;
        if len != need {
            return Err(SendError::Length { len, need });
        }
        if !self.peer_is_new.load(Ordering::Relaxed) {
            if shape.is_empty() {
                return Err(SendError::NoDimensions);
            }
            if looks_like_none(dtype, shape, bytes) {
                return Err(SendError::LooksLikeNone { dtype });
            }
        }
        let head = ImageHead::new(dtype, shape).map_err(SendError::Tensor)?;
        self.send_image(&head.encode(), bytes, false, timeout)
    }

    /// Tells the peer that there is no tensor, in the place of one.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_none(&mut self, timeout: Duration) -> Result<(), SendError> {
        self.poll()?;
        self.send_image(&none_image(), &[], true, timeout)
    }

    fn send_image(
        &mut self,
        head: &[u8],
        data: &[u8],
        is_none: bool,
        timeout: Duration,
    ) -> Result<(), SendError> {
        let deadline = deadline_after(timeout);
        let max = self.buffers.usable();
        let len = (head.len() as u64)
            .checked_add(data.len() as u64)
            .ok_or(SendError::Tensor(ImageError::Shape))?;
        if len > max {
            return Err(SendError::TooLarge { len, max });
        }
        let buffer = self.find_room(len, deadline)?;
        let slab = buffer.slab();
        slab.copy_in(buffer.offset(), head)
            .and_then(|()| slab.copy_in(buffer.offset() + head.len() as u64, data))
            .map_err(SendError::Copy)?;
        let frames = self.machine.notice(buffer.address(), len, is_none).encode();
        // Until this has succeeded nobody knows of the buffer, so it goes back with an error. Nothing is
        // announced before there is a way back for the answer: a peer that was never heard could go and
        // come back without being missed.
        loop {
            let is_heard = self.answers.was_up();
            if is_heard
                && self
                    .notices
                    .try_send(&frames)
                    .map_err(|why| self.fail(why))?
            {
                break;
            }
            self.wait(is_heard, deadline, Waiting::Peer)?;
            self.poll()?;
        }
        self.machine.handle_sent(buffer, Instant::now());
        Ok(())
    }

    /// Takes a buffer, waiting for answers to earlier notices.
    fn find_room(&mut self, len: u64, deadline: Instant) -> Result<Buffer, SendError> {
        loop {
            if self.machine.has_room()
                && let Some(buffer) = self.buffers.reserve(len)
            {
                return Ok(buffer);
            }
            self.wait(false, deadline, Waiting::Room)?;
            self.poll()?;
        }
    }

    /// Takes the answers that have come, without waiting.
    ///
    /// # Errors
    /// [`SendError::Broken`] if this direction has ended: the first reason, every time.
    pub fn poll(&mut self) -> Result<(), SendError> {
        // Asked before the messages are read, so that none that came before the end is missed.
        let link = self.answers.link().map_err(|why| self.fail(why))?;
        // One answer more than there are notices ends the direction, and with it this loop: a peer that
        // goes on sending keeps nobody here.
        while self.machine.broken().is_none() {
            let Some(frames) = self.answers.try_receive().map_err(|why| self.fail(why))? else {
                break;
            };
            // The buffer, if one comes back, goes to the pool here.
            drop(self.machine.handle_answer(&frames, Instant::now()));
        }
        if self.machine.peer_uses_numbers() {
            self.peer_is_new.store(true, Ordering::Relaxed);
        }
        if link.is_another() {
            self.machine.handle_broken(Broken::PeerRestarted);
        } else if link.is_gone() {
            self.machine.handle_broken(Broken::PeerGone);
        }
        self.machine.handle_time(Instant::now());
        match self.machine.broken() {
            Some(why) => Err(SendError::Broken(why.clone())),
            None => Ok(()),
        }
    }

    /// Waits until the peer has answered everything that was sent: it has it all.
    ///
    /// # Errors
    /// [`SendError::TimedOut`] and [`SendError::Broken`].
    pub fn flush(&mut self, timeout: Duration) -> Result<(), SendError> {
        let deadline = deadline_after(timeout);
        loop {
            let polled = self.poll();
            let has_all = self.machine.outstanding() == 0;
            match polled {
                // A peer may close once it has everything.
                Err(SendError::Broken(Broken::PeerGone | Broken::PeerRestarted)) if has_all => {
                    return Ok(());
                }
                Err(error) => return Err(error),
                Ok(()) if has_all => return Ok(()),
                Ok(()) => self.wait(false, deadline, Waiting::Answers)?,
            }
        }
    }

    /// Waits for the peer's answers, then closes this direction. It is closed, and its buffers are
    /// given back, whatever the result is: once the engine serves no more reads of them.
    ///
    /// # Errors
    /// As [`flush`](Self::flush): what is not known to have arrived.
    pub fn close(mut self, timeout: Duration) -> Result<(), SendError> {
        self.flush(timeout)
    }

    /// Returns how many tensors were sent and not answered yet.
    pub fn outstanding(&self) -> usize {
        self.machine.outstanding()
    }

    /// Returns how many bytes of buffers are in use.
    pub fn bytes_in_use(&self) -> u64 {
        self.buffers.in_use()
    }

    /// Waits until there may be something to take, or until the machine has to be told the time.
    fn wait(&mut self, to_send: bool, deadline: Instant, what: Waiting) -> Result<(), SendError> {
        if Instant::now() >= deadline {
            return Err(SendError::TimedOut(what));
        }
        let until = self
            .machine
            .deadline()
            .map_or(deadline, |due| due.min(deadline));
        wait(&self.answers, to_send.then_some(&self.notices), until).map_err(|why| self.fail(why))
    }

    fn fail(&mut self, why: SocketReason) -> SendError {
        self.machine.handle_broken(Broken::Socket(why));
        let why = self.machine.broken().cloned();
        SendError::Broken(why.unwrap_or(Broken::PeerGone))
    }
}

impl std::fmt::Debug for PipeSender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PipeSender")
            .field("outstanding", &self.machine.outstanding())
            .field("broken", &self.machine.broken())
            .finish_non_exhaustive()
    }
}

/// Longest wait of one call; as good as for ever, and can be added to any moment.
const WAIT_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);

pub(super) fn deadline_after(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(WAIT_MAX)
}
