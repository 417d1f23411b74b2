//! The threads that hand tasks to the library, a call of which may block while it connects.
// Hands over memory that the tasks keep.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use mooncake_sys as sys;

use super::core::{Core, Flight, locked};
use super::job::Job;
use super::library::NotSubmitted;
use super::queue::Chunk;
use crate::batch::{Reason, Remote};

/// Counts a thread as running until it ends, whichever way.
struct Running<'a>(&'a Core);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.submitters_running.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Hands over tasks until the engine is closed. The caller has counted the thread as running.
pub(super) fn run(core: &Core, desk: usize) {
    let running = Running(core);
    while let Some(chunk) = next(core) {
        let peer = chunk.peer;
        if catch_unwind(AssertUnwindSafe(|| hand_over(core, desk, chunk))).is_err() {
            tracing::error!(
                "a thread that submits panicked; its tasks are lost, their memory leaks"
            );
            // They stay counted, for the library may have them. The last of their promises settle here.
            let lost = std::mem::take(&mut *locked(&core.desks[desk]));
            drop(lost);
            locked(&core.queue).submitted(peer);
            core.work.notify_all();
        }
    }
    drop(running);
}

fn next(core: &Core) -> Option<Chunk<Job>> {
    let mut queue = locked(&core.queue);
    loop {
        if core.is_closing() || queue.is_closed() {
            return None;
        }
        if let Some(chunk) = queue.next() {
            return Some(chunk);
        }
        queue = core
            .work
            .wait(queue)
            .unwrap_or_else(PoisonError::into_inner);
    }
}

fn hand_over(core: &Core, desk: usize, chunk: Chunk<Job>) {
    let Chunk { peer, jobs } = chunk;
    *locked(&core.desks[desk]) = jobs.iter().map(|job| job.promise().clone()).collect();
    let (jobs, unregistered) = part_unregistered(core, jobs);
    let code = sys::STATUS_ADDRESS_NOT_REGISTERED;
    let missing = unregistered.len();
    refuse(
        core,
        unregistered,
        &Remote::Ended(Reason::NotTaken { code }),
    );
    let requests: Vec<_> = jobs.iter().map(Job::request).collect();
    #[cfg(test)]
    core.trip("hand_over");
    let submitted = match core.handle.enter() {
        Ok(Some(_)) if requests.is_empty() => Ok(None),
        // SAFETY: a job keeps its memory until it is finished. These go into a flight, where each is finished
        // when the library has said that it ended, or after the engine has been destroyed, or to those that are
        // stranded, which are finished then too; what is lost leaks.
        Ok(Some(entered)) => unsafe { entered.submit(&requests) }.map(Some).map_err(Some),
        _ => Err(None),
    };
    locked(&core.desks[desk]).clear();
    let count = jobs.len();
    // What the library does not have any more, or never had.
    let mut landed = missing;
    match submitted {
        Ok(None) => {}
        Ok(Some(batch)) => {
            let flight = Flight {
                batch,
                peer,
                jobs: jobs.into_iter().map(Some).collect(),
                has_complained: false,
            };
            let mut inbox = locked(&core.inbox);
            inbox.push(flight);
            core.news.notify_one();
        }
        Err(Some(NotSubmitted::Unclear { code })) => {
            for job in &jobs {
                job.peer().is_stale.store(true, Ordering::Relaxed);
                job.hold(Reason::NotTaken { code });
            }
            locked(&core.stranded).extend(jobs);
        }
        Err(Some(NotSubmitted::Nothing { code })) => {
            landed += count;
            refuse(core, jobs, &Remote::Ended(Reason::NotTaken { code }));
        }
        Err(None) => {
            landed += count;
            refuse(core, jobs, &Remote::Ended(Reason::ShutDown));
        }
    }
    let mut queue = locked(&core.queue);
    queue.submitted(peer);
    queue.landed(peer, 0, landed);
}

/// Takes out the jobs whose memory the library would have to know and does not. It would say so itself, but
/// perhaps after it has begun others of the call.
fn part_unregistered(core: &Core, jobs: Vec<Job>) -> (Vec<Job>, Vec<Job>) {
    if core.handle.is_tcp() {
        return (jobs, Vec::new());
    }
    let book = locked(&core.memory);
    jobs.into_iter().partition(|job| {
        let request = job.request();
        book.covers(request.source.address(), request.len)
    })
}

/// Settles jobs that were never begun.
fn refuse(core: &Core, jobs: Vec<Job>, remote: &Remote) {
    core.tasks_open.fetch_sub(jobs.len(), Ordering::SeqCst);
    for job in jobs {
        job.peer().is_stale.store(true, Ordering::Relaxed);
        job.finish(remote.clone());
    }
}
