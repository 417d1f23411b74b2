//! The thread that asks the library how tasks are, gives up the late ones, and ends the engine.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mooncake_sys as sys;

use super::core::{Core, Flight, locked};
use super::job::{Job, drop_caught};
use super::queue::PeerKey;
use crate::batch::{Reason, Remote};

/// How often late tasks are looked for.
const TICK: Duration = Duration::from_millis(20);
/// Rounds without news before the thread sleeps between them.
const EAGER_ROUNDS: u32 = 200;
/// The shortest and the longest sleep between two rounds while tasks are in the library.
const NAP_MIN: Duration = Duration::from_micros(20);
const NAP_MAX: Duration = Duration::from_millis(1);

/// Watches until the engine is closed, then ends it. A panic ends it too: tasks are not watched any more, and
/// settle once the library has been destroyed.
pub(super) fn run(core: &Core) {
    // Outlives a panic: nothing of it may be let go of before the library has been destroyed.
    let mut flights = Vec::new();
    let watched = catch_unwind(AssertUnwindSafe(|| {
        watch(core, &mut flights);
        close_queue(core);
        // A call that hands over tasks has to return first. Meanwhile tasks go on, and end, and are given up.
        while core.submitters_running.load(Ordering::SeqCst) > 0 {
            flights.append(&mut locked(&core.inbox));
            poll(core, &mut flights);
            give_up_late(core, &flights);
            std::thread::sleep(NAP_MAX);
        }
    }));
    if watched.is_err() {
        tracing::error!("the engine's thread panicked; the engine stops");
        core.close();
        close_queue(core);
        while core.submitters_running.load(Ordering::SeqCst) > 0 {
            // What a thread that submits has at hand settles in time all the same.
            let looked = catch_unwind(AssertUnwindSafe(|| give_up_late(core, &flights)));
            if looked.is_err() {
                tracing::error!("looking for late tasks panicked");
            }
            std::thread::sleep(NAP_MAX);
        }
    }
    end(core, flights);
}

fn watch(core: &Core, flights: &mut Vec<Flight>) {
    let mut quiet_rounds = 0_u32;
    let mut looked = Instant::now();
    while !core.is_closing() {
        quiet_rounds = match poll(core, flights) {
            true => 0,
            false => quiet_rounds.saturating_add(1),
        };
        if looked.elapsed() >= TICK {
            give_up_late(core, flights);
            looked = Instant::now();
        }
        pause(core, flights, quiet_rounds);
    }
}

/// Lets no further task be handed over, and settles those that wait.
fn close_queue(core: &Core) {
    let waiting = locked(&core.queue).close();
    core.work.notify_all();
    for job in waiting {
        job.finish(Remote::Ended(Reason::ShutDown));
    }
}

/// Waits for news, or for the next round.
fn pause(core: &Core, flights: &mut Vec<Flight>, quiet_rounds: u32) {
    let mut inbox = locked(&core.inbox);
    if !inbox.is_empty() {
        flights.append(&mut inbox);
        return;
    }
    if core.is_closing() {
        return;
    }
    let nap = if !flights.is_empty() {
        if quiet_rounds < EAGER_ROUNDS {
            drop(inbox);
            std::thread::yield_now();
            return;
        }
        let doublings = ((quiet_rounds - EAGER_ROUNDS) / 64).min(6);
        (NAP_MIN * (1 << doublings)).min(NAP_MAX)
    } else if core.tasks_open.load(Ordering::SeqCst) > 0 {
        TICK
    } else {
        // Woken by `submit`, by a thread that submits, and by `close`.
        drop(
            core.news
                .wait(inbox)
                .unwrap_or_else(PoisonError::into_inner),
        );
        return;
    };
    let (mut inbox, _) = core
        .news
        .wait_timeout(inbox, nap)
        .unwrap_or_else(PoisonError::into_inner);
    flights.append(&mut inbox);
}

/// Asks about every task that is in the library. Says whether one has ended.
fn poll(core: &Core, flights: &mut Vec<Flight>) -> bool {
    if flights.is_empty() {
        return false;
    }
    #[cfg(test)]
    core.trip("poll");
    let mut ended: Vec<(PeerKey, Job, Remote)> = Vec::new();
    {
        let Ok(Some(entered)) = core.handle.enter() else {
            return false;
        };
        for flight in flights.iter_mut() {
            for (index, slot) in flight.jobs.iter_mut().enumerate() {
                if slot.is_none() {
                    continue;
                }
                let remote = match entered.state(&flight.batch, index) {
                    Ok(sys::STATE_COMPLETED) => Remote::Applied,
                    // The peer may have stored bytes, or be storing them: the library does not say.
                    Ok(state @ sys::STATE_FAILED) => Remote::Unknown(Reason::Undisclosed { state }),
                    // Not ended. A state of "timeout" is no end: the library may still touch the bytes.
                    Ok(_) => continue,
                    Err(code) => {
                        if !flight.has_complained {
                            flight.has_complained = true;
                            tracing::error!(code, "the library does not say how a task is");
                        }
                        continue;
                    }
                };
                ended.extend(slot.take().map(|job| (flight.peer, job, remote)));
            }
        }
        let done = flights.extract_if(.., |flight| flight.jobs.iter().all(Option::is_none));
        for flight in done {
            if let Err(code) = entered.free(flight.batch) {
                tracing::error!(code, "the library does not free a batch, which leaks");
            }
        }
    }
    let has_ended = !ended.is_empty();
    if has_ended {
        let mut queue = locked(&core.queue);
        let mut more = false;
        for (peer, job, remote) in &ended {
            let applied = usize::from(remote.is_applied());
            if applied == 0 {
                job.peer().is_stale.store(true, Ordering::Relaxed);
            }
            more |= queue.landed(*peer, applied, 1 - applied);
        }
        drop(queue);
        if more {
            core.work.notify_all();
        }
        core.tasks_open.fetch_sub(ended.len(), Ordering::SeqCst);
    }
    for (_, job, remote) in ended {
        job.finish(remote);
    }
    has_ended
}

/// Settles tasks that are late: those that the library has are held, those that wait are over.
fn give_up_late(core: &Core, flights: &[Flight]) {
    let now = Instant::now();
    let late = locked(&core.queue).take_late(now);
    core.tasks_open.fetch_sub(late.len(), Ordering::SeqCst);
    for job in late {
        job.finish_late();
    }
    let mut promises = Vec::new();
    for desk in &core.desks {
        promises.extend(
            locked(desk)
                .iter()
                .filter(|promise| promise.is_late(now))
                .cloned(),
        );
    }
    for promise in promises {
        promise.give_up();
    }
    for job in flights
        .iter()
        .flat_map(|flight| flight.jobs.iter().flatten())
    {
        if job.promise().is_late(now) && job.promise().give_up() {
            job.peer().is_stale.store(true, Ordering::Relaxed);
        }
    }
}

/// Ends the engine: nothing of it touches memory afterwards. No thread submits any more.
fn end(core: &Core, mut flights: Vec<Flight>) {
    core.handle.destroy();
    flights.append(&mut locked(&core.inbox));
    // Their batches cannot be freed any more, and leak.
    let stranded = std::mem::take(&mut *locked(&core.stranded));
    let flying = flights.into_iter().flat_map(|flight| flight.jobs).flatten();
    for job in flying.chain(stranded) {
        job.finish(Remote::Unknown(Reason::ShutDown));
    }
    let kept = locked(&core.memory).take_kept();
    for memory in kept {
        drop_caught(memory);
    }
    core.note_ended();
}
