//! The threads that hand tasks to the library, a call of which may block while it connects.
// Hands over memory that the tasks keep.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::core::{Core, Flight, locked};
use super::job::Job;
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
    let requests: Vec<_> = jobs.iter().map(Job::request).collect();
    #[cfg(test)]
    core.trip("hand_over");
    let submitted = match core.handle.enter() {
        // SAFETY: a job keeps its memory until it is finished. These go into a flight, where each is finished
        // when the library has said that it ended, or after the engine has been destroyed; what is lost leaks.
        Ok(Some(entered)) => unsafe { entered.submit(&requests) }
            .map_err(|code| Remote::Ended(Reason::NotTaken { code })),
        _ => Err(Remote::Ended(Reason::ShutDown)),
    };
    locked(&core.desks[desk]).clear();
    match submitted {
        Ok(batch) => {
            let flight = Flight {
                batch,
                peer,
                jobs: jobs.into_iter().map(Some).collect(),
                has_complained: false,
            };
            let mut inbox = locked(&core.inbox);
            inbox.push(flight);
            core.news.notify_one();
            drop(inbox);
            locked(&core.queue).submitted(peer);
        }
        Err(remote) => {
            let count = jobs.len();
            {
                let mut queue = locked(&core.queue);
                queue.submitted(peer);
                queue.landed(peer, 0, count);
            }
            core.tasks_open.fetch_sub(count, Ordering::SeqCst);
            for job in jobs {
                job.peer().is_stale.store(true, Ordering::Relaxed);
                job.finish(remote.clone());
            }
        }
    }
}
