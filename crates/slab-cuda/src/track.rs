//! How far one stream has come: the points recorded in it, oldest first, and what is held until each is passed.
//!
//! Values number the points from 1 and only grow. A stream passes its points in order, so that one value says it all.
//! Pure: a point is whatever can say whether it was passed.

use std::collections::VecDeque;

use crate::error::{CudaError, DriverCode};

/// A point in a stream.
pub trait Mark {
    /// Whether the stream has passed it. An error says that nobody will know.
    fn poll(&mut self) -> Result<bool, CudaError>;
}

/// A point in the queue. One that was passed is handed out whole: its mark may own what others have made.
pub(crate) struct Point<E, H> {
    mark: E,
    value: u64,
    pub(crate) hold: H,
}

/// The points of one stream. `H` is held until the point behind it is passed.
pub(crate) struct Track<E, H> {
    queue: VecDeque<Point<E, H>>,
    last: u64,
    reached: u64,
    /// A point that could not be recorded: its value is never reached, what was recorded before still may be.
    broken: Option<CudaError>,
    /// Nothing more is reached.
    failed: Option<CudaError>,
    /// What is held for ever, because nobody knows when it could be let go.
    stranded: Vec<H>,
}

impl<E: Mark, H> Track<E, H> {
    pub(crate) const fn new() -> Self {
        Self {
            queue: VecDeque::new(),
            last: 0,
            reached: 0,
            broken: None,
            failed: None,
            stranded: Vec::new(),
        }
    }

    /// Adds the point that was just recorded, or takes note that it was not. Returns its value.
    pub(crate) fn push(&mut self, mark: Result<E, CudaError>, hold: H) -> u64 {
        self.last += 1;
        match mark {
            Ok(mark) if self.error().is_none() => self.queue.push_back(Point {
                mark,
                value: self.last,
                hold,
            }),
            // A value behind one that is never reached is not reached either.
            Ok(_) => self.stranded.push(hold),
            Err(error) => {
                self.stranded.push(hold);
                self.broken.get_or_insert(error);
            }
        }
        self.last
    }

    /// Looks how far the stream has come. What need not be held any more goes to `ended`, to be dropped where no lock is
    /// held: both halves of a point may run destructors of the program's own.
    ///
    /// O(points passed since the last look).
    pub(crate) fn poll(&mut self, ended: &mut Vec<Point<E, H>>) {
        while self.failed.is_none()
            && let Some(front) = self.queue.front_mut()
        {
            match front.mark.poll() {
                Ok(false) => return,
                Ok(true) => {
                    self.reached = front.value;
                    ended.extend(self.queue.pop_front());
                }
                Err(error) => self.failed = Some(error),
            }
        }
        if self.failed.is_none() {
            self.failed.clone_from(&self.broken);
        }
    }

    pub(crate) fn reached(&self) -> u64 {
        self.reached
    }

    /// Why nothing more will be reached.
    pub(crate) fn failed(&self) -> Option<&CudaError> {
        self.failed.as_ref()
    }

    /// Why nothing more can be recorded.
    pub(crate) fn error(&self) -> Option<&CudaError> {
        self.failed.as_ref().or(self.broken.as_ref())
    }

    /// Points that may still be passed.
    pub(crate) fn pending(&self) -> usize {
        match self.failed {
            None => self.queue.len(),
            Some(_) => 0,
        }
    }

    /// Whether everything that was recorded is passed.
    pub(crate) fn is_drained(&self) -> bool {
        self.queue.is_empty() && self.error().is_none()
    }

    /// The points that are not passed, which nobody will look at again.
    pub(crate) fn take_points(&mut self) -> Vec<Point<E, H>> {
        std::mem::take(&mut self.queue).into()
    }

    /// What is held for points that are not passed, and for those that never will be.
    pub(crate) fn into_held(self) -> impl Iterator<Item = H> {
        let queued = self.queue.into_iter().map(|point| point.hold);
        queued.chain(self.stranded)
    }
}

/// The error that a call gets on a stream that has failed before.
pub(crate) fn failed_before(error: &CudaError) -> CudaError {
    match error {
        CudaError::Driver { call, code } | CudaError::StreamFailed { call, code } => {
            CudaError::StreamFailed { call, code: *code }
        }
        // The capture may be over. That nothing was recorded while it lasted is for good.
        CudaError::StreamCapturing => CudaError::StreamFailed {
            call: "cuEventRecord",
            code: DriverCode::new(900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
        },
        other => other.clone(),
    }
}

#[cfg(all(test, not(slab_loom)))]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    /// 0 not passed, 1 passed, else an error.
    #[derive(Clone, Default)]
    struct Toy(Rc<Cell<u32>>);

    impl Mark for Toy {
        fn poll(&mut self) -> Result<bool, CudaError> {
            match self.0.get() {
                0 => Ok(false),
                1 => Ok(true),
                code => Err(error(code)),
            }
        }
    }

    fn error(code: u32) -> CudaError {
        CudaError::Driver {
            call: "toy",
            code: DriverCode::new(code, "TOY"),
        }
    }

    fn track(count: u32) -> (Track<Toy, u32>, Vec<Toy>) {
        let mut track = Track::new();
        let toys: Vec<Toy> = (0..count).map(|_| Toy::default()).collect();
        for (at, toy) in toys.iter().enumerate() {
            assert_eq!(track.push(Ok(toy.clone()), at as u32), at as u64 + 1);
        }
        (track, toys)
    }

    fn polled(track: &mut Track<Toy, u32>) -> Vec<u32> {
        let mut ended = Vec::new();
        track.poll(&mut ended);
        ended.into_iter().map(|point| point.hold).collect()
    }

    #[test]
    fn points_are_passed_in_order_and_a_later_one_does_not_overtake() {
        let (mut track, toys) = track(3);
        toys[1].0.set(1);
        assert!(polled(&mut track).is_empty());
        assert_eq!(track.reached(), 0);
        toys[0].0.set(1);
        assert_eq!(polled(&mut track), [0, 1]);
        assert_eq!((track.reached(), track.pending()), (2, 1));
    }

    #[test]
    fn a_query_that_fails_ends_the_track_and_keeps_what_is_held() {
        let (mut track, toys) = track(3);
        toys[0].0.set(1);
        toys[1].0.set(700);
        assert_eq!(polled(&mut track), [0]);
        assert_eq!(track.failed(), Some(&error(700)));
        toys[1].0.set(1);
        toys[2].0.set(1);
        assert!(polled(&mut track).is_empty(), "an error is for good");
        assert_eq!(track.reached(), 1);
        assert_eq!(track.into_held().collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn what_was_recorded_before_a_record_that_failed_is_still_reached() {
        let (mut track, toys) = track(1);
        let lost = track.push(Err(error(999)), 7);
        assert_eq!(track.push(Ok(Toy(Rc::new(Cell::new(1)))), 8), lost + 1);
        assert!(polled(&mut track).is_empty());
        assert!(track.failed().is_none() && track.error().is_some());
        toys[0].0.set(1);
        assert_eq!(polled(&mut track), [0]);
        assert_eq!(track.failed(), Some(&error(999)));
        assert_eq!(track.reached(), 1);
        assert!(!track.is_drained());
        assert_eq!(track.into_held().collect::<Vec<_>>(), [7, 8]);
    }
}
