//! Streams: queues of work that runs in order, and events in them.

use std::collections::{HashMap, VecDeque};

/// A range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) address: u64,
    pub(crate) len: u64,
}

impl Span {
    pub(crate) fn end(self) -> u64 {
        self.address.saturating_add(self.len)
    }

    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.len > 0 && other.len > 0 && self.address < other.end() && other.address < self.end()
    }
}

/// One piece of work.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    Copy {
        target: Span,
        source: Span,
    },
    /// A kernel that reads a range, and writes `value` all over it if there is one.
    Kernel {
        span: Span,
        value: Option<u8>,
    },
    Record {
        event: u64,
        round: u64,
    },
    Wait {
        event: u64,
        round: u64,
    },
}

impl Work {
    pub(crate) fn touches(&self, span: Span) -> bool {
        match self {
            Self::Copy { target, source } => target.overlaps(span) || source.overlaps(span),
            Self::Kernel { span: own, .. } => own.overlaps(span),
            Self::Record { .. } | Self::Wait { .. } => false,
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Stream {
    pub(crate) device: i32,
    pub(crate) queue: VecDeque<Work>,
    pub(crate) destroyed: bool,
    /// The error that ended it: its work never runs, and never ends.
    pub(crate) failed: Option<u32>,
    /// A test keeps it from running, whatever the schedule.
    pub(crate) held: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Event {
    pub(crate) device: i32,
    /// How often it was recorded, and how many of these the streams have passed.
    pub(crate) recorded: u64,
    pub(crate) reached: u64,
    /// Where it was recorded last.
    pub(crate) stream: u64,
    /// Nobody's any more, and there only for the streams that have to pass it or wait for it.
    pub(crate) destroyed: bool,
    /// It was recorded last into a graph.
    pub(crate) captured: bool,
}

impl Event {
    pub(crate) fn is_pending(&self) -> bool {
        self.reached < self.recorded
    }
}

/// All streams and events.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    pub(crate) streams: HashMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Event>,
}

impl Streams {
    /// An event that was not destroyed.
    pub(crate) fn event(&mut self, handle: u64) -> Option<&mut Event> {
        let event = self.events.get_mut(&handle);
        event.filter(|event| !event.destroyed)
    }

    /// A stream has passed an event.
    pub(crate) fn pass(&mut self, handle: u64, round: u64) {
        if let Some(event) = self.events.get_mut(&handle) {
            event.reached = event.reached.max(round);
            if event.destroyed && !event.is_pending() {
                self.events.remove(&handle);
            }
        }
    }

    /// Queued work that touches a range.
    pub(crate) fn touching(&self, span: Span) -> usize {
        let queued = self.streams.values().flat_map(|stream| &stream.queue);
        queued.filter(|work| work.touches(span)).count()
    }

    /// Takes the next piece of work of a stream that can run.
    pub(crate) fn next(&mut self, stream: u64) -> Option<Work> {
        let line = self.streams.get_mut(&stream)?;
        if line.failed.is_some() || line.held {
            return None;
        }
        if let Some(Work::Wait { event, round }) = line.queue.front() {
            // An event that is gone was passed before.
            let is_reached = self.events.get(event).is_none_or(|e| e.reached >= *round);
            if !is_reached {
                return None;
            }
        }
        let work = line.queue.pop_front();
        if line.destroyed && line.queue.is_empty() {
            self.streams.remove(&stream);
        }
        work
    }

    /// Streams with work, in the order of their making.
    pub(crate) fn busy(&self) -> Vec<u64> {
        let mut busy: Vec<u64> = self
            .streams
            .iter()
            .filter(|(_, stream)| !stream.queue.is_empty())
            .map(|(handle, _)| *handle)
            .collect();
        busy.sort_unstable();
        busy
    }
}
