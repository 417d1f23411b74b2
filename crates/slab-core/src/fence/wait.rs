//! The book of fences: how far each timeline has come, what a region must wait for, and which runs wait.
//!
//! A region's fences are a chain of marks, at most one a timeline (the highest value). A waiting run is
//! queued on *one* of its unreached fences at a time, in a heap by value; when that one is reached it
//! moves to the next. So reaching a value costs O(log n) amortised for each queue a run stood in, and a
//! run leaves exactly when its last fence is reached.

use crate::error::Error;
use crate::fence::{Fence, TimelineId};
use crate::heap::{self, Linked, Links};
use crate::id::PoolId;
use crate::slots::{NIL, Slots};
use crate::store::{Array, Store};
use crate::twin::{Twin, is_left_out};

/// The fences recorded on one region. Owned by whoever owns the region; not `Clone`.
#[derive(Debug)]
#[must_use = "dropping marks leaks them and forgets what the region waits for"]
pub(crate) struct Marks(u32);

impl Marks {
    pub(crate) const NONE: Self = Self(NIL);
}

/// Where a region stands with its fences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// All reached.
    Reached,
    /// Some not reached yet.
    Pending,
    /// At least one will never be reached.
    Failed,
}

/// A run whose bytes come back when its fences are reached.
#[derive(Debug)]
pub(crate) struct Wait {
    /// Slot of the run.
    pub(crate) run: u32,
    /// The claim that withholds it, or `NIL`.
    pub(crate) claim: u32,
    marks: Marks,
    /// The fence it is queued on, and its place in that queue.
    timeline: u32,
    value: u64,
    links: Links,
    older: u32,
    newer: u32,
}

#[derive(Clone, Copy)]
struct Mark {
    timeline: u32,
    value: u64,
    next: u32,
}

#[derive(Clone, Copy)]
struct Timeline {
    reached: u64,
    failed: bool,
    /// Heap of the waits queued here, lowest value on top.
    queue: u32,
}

pub(crate) struct Timelines<St: Store> {
    pool: PoolId,
    timelines: St::Array<Timeline>,
    timelines_max: u32,
    marks: Slots<Mark, St>,
    waits: Slots<Wait, St>,
    oldest: u32,
    newest: u32,
}

impl<St: Store> Timelines<St> {
    pub(crate) const fn new(pool: PoolId, timelines_max: u32) -> Self {
        Self {
            pool,
            timelines: <St::Array<Timeline> as Array<Timeline>>::EMPTY,
            timelines_max,
            marks: Slots::EMPTY,
            waits: Slots::EMPTY,
            oldest: NIL,
            newest: NIL,
        }
    }

    pub(crate) fn add(&mut self) -> Result<TimelineId, Error> {
        let index = self.timelines.len() as u32;
        let timeline = Timeline {
            reached: 0,
            failed: false,
            queue: NIL,
        };
        if index >= self.timelines_max || self.timelines.push(timeline).is_err() {
            return Err(Error::TooManyTimelines {
                timelines_max: self.timelines_max.min(St::SLOTS_MAX),
            });
        }
        Ok(TimelineId {
            pool: self.pool,
            index,
        })
    }

    /// Whether marks may not be enough for these fences, so that reached ones should be forgotten first. Only in
    /// stores with a bound.
    pub(crate) fn is_short_of_marks(&self, fences: &[Fence]) -> bool {
        fences.len() as u64 > u64::from(self.marks.room())
    }

    /// Forgets the marks of a region that are reached. O(timelines).
    pub(crate) fn forget_reached(&mut self, marks: &mut Marks) {
        let mut kept = NIL;
        let mut at = marks.0;
        while at != NIL {
            let Mark {
                timeline,
                value,
                next,
            } = self.marks[at];
            if self.standing_of(timeline, value) == Standing::Reached {
                self.marks.remove(at);
            } else {
                self.marks[at].next = kept;
                kept = at;
            }
            at = next;
        }
        marks.0 = kept;
    }

    /// As [`forget_reached`](Self::forget_reached), for every run that waits. O(waits × timelines).
    pub(crate) fn forget_reached_of_waits(&mut self) {
        let mut at = self.oldest;
        while at != NIL {
            let mut marks = core::mem::replace(&mut self.waits[at].marks, Marks::NONE);
            self.forget_reached(&mut marks);
            self.waits[at].marks = marks;
            at = self.waits[at].newer;
        }
    }

    /// Whether fences can be recorded on a region with these marks: all on timelines of ours, and room for the
    /// marks that they add. O(fences), and O(fences × (timelines + fences)) near the bound of the store.
    pub(crate) fn check_all(&self, marks: &Marks, fences: &[Fence]) -> Result<(), Error> {
        for fence in fences {
            self.check(fence.timeline())?;
        }
        if self.is_short_of_marks(fences)
            && self.marks_added(marks, fences) > self.marks.room() as usize
        {
            return Err(Error::TooManyFences {
                fences_max: St::SLOTS_MAX,
            });
        }
        Ok(())
    }

    /// Marks that checked fences would add.
    fn marks_added(&self, marks: &Marks, fences: &[Fence]) -> usize {
        let is_new = |index: usize| {
            let (timeline, value) = (fences[index].timeline().index, fences[index].value());
            let is_pending = |value| self.standing_of(timeline, value) != Standing::Reached;
            let is_marked = || self.marks_of(marks).any(|mark| mark.timeline == timeline);
            let comes_before =
                |fence: &Fence| fence.timeline().index == timeline && is_pending(fence.value());
            is_pending(value) && !is_marked() && !fences[..index].iter().any(comes_before)
        };
        (0..fences.len()).filter(|index| is_new(*index)).count()
    }

    fn marks_of(&self, marks: &Marks) -> impl Iterator<Item = &Mark> + '_ {
        let mut at = marks.0;
        core::iter::from_fn(move || {
            let mark = self.marks.get(at)?;
            at = mark.next;
            Some(mark)
        })
    }

    /// The timeline's number, if it is one of ours.
    pub(crate) fn check(&self, id: TimelineId) -> Result<u32, Error> {
        if id.pool == self.pool && (id.index as usize) < self.timelines.len() {
            Ok(id.index)
        } else {
            Err(Error::UnknownTimeline { timeline: id.index })
        }
    }

    /// Adds checked fences to a region's marks. Reached ones need no mark; failed ones keep theirs.
    pub(crate) fn record(&mut self, marks: &mut Marks, fences: &[Fence]) {
        for fence in fences {
            let (timeline, value) = (fence.timeline().index, fence.value());
            if self.standing_of(timeline, value) == Standing::Reached
                || is_left_out(Twin::RecordMark)
            {
                continue;
            }
            let mut at = marks.0;
            while at != NIL && self.marks[at].timeline != timeline {
                at = self.marks[at].next;
            }
            if at == NIL {
                marks.0 = self.marks.insert(Mark {
                    timeline,
                    value,
                    next: marks.0,
                });
            } else if !is_left_out(Twin::RaiseMark) {
                let mark = &mut self.marks[at];
                mark.value = mark.value.max(value);
            }
        }
    }

    /// O(timelines).
    pub(crate) fn standing(&self, marks: &Marks) -> Standing {
        let mut standing = Standing::Reached;
        let mut at = marks.0;
        while at != NIL {
            let Mark {
                timeline,
                value,
                next,
            } = self.marks[at];
            match self.standing_of(timeline, value) {
                Standing::Failed => return Standing::Failed,
                Standing::Pending => standing = Standing::Pending,
                Standing::Reached => {}
            }
            at = next;
        }
        standing
    }

    /// Drops a region's marks: its fences are reached, or it will never be reused.
    pub(crate) fn forget(&mut self, marks: Marks) {
        let mut at = marks.0;
        while let Some(mark) = self.marks.remove(at) {
            at = mark.next;
        }
    }

    /// Lets the run at `slot` wait for its marks, which are pending. Returns the wait.
    pub(crate) fn park(&mut self, run: u32, marks: Marks) -> u32 {
        let wait = self.waits.insert(Wait {
            run,
            claim: NIL,
            marks,
            timeline: NIL,
            value: 0,
            links: Links::NONE,
            older: self.newest,
            newer: NIL,
        });
        match self.newest {
            NIL => self.oldest = wait,
            newest => self.waits[newest].newer = wait,
        }
        self.newest = wait;
        self.queue(wait);
        wait
    }

    pub(crate) fn wait(&self, wait: u32) -> &Wait {
        &self.waits[wait]
    }

    pub(crate) fn set_claim(&mut self, wait: u32, claim: u32) {
        self.waits[wait].claim = claim;
    }

    /// The waits, oldest first.
    pub(crate) fn oldest_first(&self) -> impl Iterator<Item = &Wait> + '_ {
        let mut at = self.oldest;
        core::iter::from_fn(move || {
            let wait = self.waits.get(at)?;
            at = wait.newer;
            Some(wait)
        })
    }

    /// Moves the timeline up to `value`; never down.
    pub(crate) fn reach(&mut self, timeline: u32, value: u64) -> Result<(), Error> {
        let line = &mut self.timelines[timeline as usize];
        if line.failed {
            return Err(Error::TimelineFailed { timeline });
        }
        line.reached = line.reached.max(value);
        Ok(())
    }

    /// The next run whose last fence was on this timeline and is reached.
    pub(crate) fn next_reached(&mut self, timeline: u32) -> Option<Wait> {
        loop {
            let Timeline { reached, queue, .. } = self.timelines[timeline as usize];
            if queue == NIL || self.waits[queue].value > reached {
                return None;
            }
            self.unqueue(queue);
            if is_left_out(Twin::QueueAgain) || !self.queue(queue) {
                return self.unpark(queue);
            }
        }
    }

    pub(crate) fn fail(&mut self, timeline: u32) {
        self.timelines[timeline as usize].failed = true;
    }

    /// The oldest run that waits for a failed timeline at or after `cursor` (start with
    /// [`first_wait`](Self::first_wait)), and the cursor to go on from. O(waits) for a whole sweep.
    pub(crate) fn next_failed(&mut self, mut cursor: u32) -> Option<(Wait, u32)> {
        while let Some(wait) = self.waits.get(cursor) {
            let newer = wait.newer;
            if self.standing(&wait.marks) == Standing::Failed {
                self.unqueue(cursor);
                return self.unpark(cursor).map(|wait| (wait, newer));
            }
            cursor = newer;
        }
        None
    }

    /// Whether any run waits.
    pub(crate) const fn is_waited(&self) -> bool {
        self.oldest != NIL
    }

    pub(crate) const fn first_wait(&self) -> u32 {
        self.oldest
    }

    fn standing_of(&self, timeline: u32, value: u64) -> Standing {
        let line = &self.timelines[timeline as usize];
        // What was reached before the failure stays reached.
        if line.reached >= value {
            Standing::Reached
        } else if line.failed {
            Standing::Failed
        } else {
            Standing::Pending
        }
    }

    /// Queues a wait on one of its unreached fences. False if there is none.
    fn queue(&mut self, wait: u32) -> bool {
        let mut at = self.waits[wait].marks.0;
        while at != NIL {
            let Mark {
                timeline,
                value,
                next,
            } = self.marks[at];
            if self.standing_of(timeline, value) == Standing::Pending {
                self.waits[wait].timeline = timeline;
                self.waits[wait].value = value;
                let root = self.timelines[timeline as usize].queue;
                self.timelines[timeline as usize].queue = heap::push(&mut self.waits, root, wait);
                return true;
            }
            at = next;
        }
        false
    }

    fn unqueue(&mut self, wait: u32) {
        let line = &mut self.timelines[self.waits[wait].timeline as usize];
        line.queue = heap::remove(&mut self.waits, line.queue, wait);
    }

    /// Ends a wait that is in no queue.
    fn unpark(&mut self, wait: u32) -> Option<Wait> {
        let mut ended = self.waits.remove(wait)?;
        match ended.older {
            NIL => self.oldest = ended.newer,
            older => self.waits[older].newer = ended.newer,
        }
        match ended.newer {
            NIL => self.newest = ended.older,
            newer => self.waits[newer].older = ended.older,
        }
        let marks = core::mem::replace(&mut ended.marks, Marks::NONE);
        self.forget(marks);
        Some(ended)
    }
}

/// Queues have the lowest value on top.
impl<St: Store> Linked for Slots<Wait, St> {
    fn links(&self, index: u32) -> Links {
        self[index].links
    }

    fn links_mut(&mut self, index: u32) -> &mut Links {
        &mut self[index].links
    }

    fn stands_above(&self, a: u32, b: u32) -> bool {
        self[a].value <= self[b].value
    }
}
