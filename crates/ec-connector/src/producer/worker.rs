//! What the producer's threads do: carry out the actions of push records.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use mooncake_transport::{ControlError, Engine, EngineError, Op, Reason, Remote, Segment, Task};

use super::PushError;
use super::clients::Clients;
use super::queue::Queue;
use super::record::{Bytes, Record};
use crate::control::{
    ClientError, ControlAddress, ControlClient, ControlContext, Refusal, RemoteReserve,
};
use crate::moment::Moment;
use crate::push::{
    Cause, Delivery, PushAction, PushAnswer, PushFailure, PushMachine, PushStep, Reserved,
    WriteEnd, WriteError,
};
use crate::staging::Staging;

/// What the threads of a producer share.
pub(super) struct Site {
    engine: Arc<dyn Engine>,
    staging: Staging,
    context: ControlContext,
    threads: usize,
    /// The one shard of each consumer that has been asked for it; forgotten when it does not answer (row D7).
    shards: Mutex<HashMap<ControlAddress, ControlAddress>>,
    segments: Mutex<HashMap<String, Segment>>,
}

/// How a request treats a consumer that refuses connections.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Patience {
    /// It may be about to start.
    UntilTimeout,
    /// It is gone.
    WhileItAnswers,
}

/// Consumers that are remembered; beyond it all are forgotten and asked again.
const CONSUMERS_MAX: usize = 256;

impl Site {
    /// What `threads` threads share.
    pub(super) fn new(engine: Arc<dyn Engine>, staging: Staging, threads: usize) -> Self {
        Self {
            engine,
            staging,
            context: ControlContext::new(),
            threads,
            shards: Mutex::default(),
            segments: Mutex::default(),
        }
    }

    fn shard(&self, consumer: &ControlAddress) -> Option<ControlAddress> {
        let shards = self.shards.lock().unwrap_or_else(PoisonError::into_inner);
        shards.get(consumer).cloned()
    }

    fn remember_shard(&self, consumer: ControlAddress, shard: ControlAddress) {
        let mut shards = self.shards.lock().unwrap_or_else(PoisonError::into_inner);
        if shards.len() >= CONSUMERS_MAX {
            shards.clear();
        }
        shards.insert(consumer, shard);
    }

    fn forget_shard(&self, consumer: &ControlAddress) {
        let mut shards = self.shards.lock().unwrap_or_else(PoisonError::into_inner);
        shards.remove(consumer);
    }

    fn segment(&self, session: &str) -> Result<Segment, EngineError> {
        let known = {
            let segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
            segments.get(session).cloned()
        };
        if let Some(segment) = known {
            return Ok(segment);
        }
        let segment = self.engine.open_segment(session)?;
        let mut segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
        if segments.len() >= CONSUMERS_MAX {
            segments.clear();
        }
        segments.insert(session.to_owned(), segment.clone());
        Ok(segment)
    }

    fn forget_segment(&self, session: &str) {
        let mut segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
        segments.remove(session);
    }
}

/// Works until the queue is closed and empty.
pub(super) fn run(queue: &Queue, site: &Site) {
    let mut worker = Worker {
        queue,
        site,
        clients: Clients::new(site.context.clone(), site.threads),
    };
    while let Some(record) = queue.next() {
        let lane = record.lane();
        // A defect that shows with one push must not take the thread from the others.
        match catch_unwind(AssertUnwindSafe(|| worker.drive(record))) {
            Ok(Rest::Waits(at, record)) => queue.wait(at, *record),
            Ok(Rest::Ended(result, record)) => queue.end(*record, result),
            Err(_) => {
                tracing::error!("a push was lost to a panic");
                worker.clients.clear();
                queue.lose(&lane);
            }
        }
    }
}

/// Why a thread lets a push go.
enum Rest {
    /// There is nothing to do for it before that moment, or before there is room if it has a place in that line.
    Waits(Moment, Box<Record>),
    /// It has ended.
    Ended(Result<Delivery, PushError>, Box<Record>),
}

struct Worker<'a> {
    queue: &'a Queue,
    site: &'a Site,
    clients: Clients,
}

impl Worker<'_> {
    /// Carries a push on until it has to wait or has ended.
    fn drive(&mut self, record: Record) -> Rest {
        let mut record = Box::new(record);
        loop {
            let mut machine = self.queue.machine(&mut record);
            let step = machine.poll(self.queue.now(), || self.queue.ids().transfer_id());
            if !matches!(
                step,
                PushStep::WaitForRoom(_) | PushStep::Do(PushAction::Stage)
            ) {
                // It does not wait for room any more, and must not keep others from it.
                record.turn = None;
            }
            let ended = match step {
                PushStep::Do(action) => self.act(action, &mut record, &mut machine).err().map(Err),
                PushStep::WaitUntil(at) | PushStep::WaitForRoom(at) => {
                    record.machine = Some(machine);
                    return Rest::Waits(at, record);
                }
                PushStep::Done(outcome) => Some(outcome.result.map_err(PushError::Failed)),
                PushStep::InProgress => unreachable!("one thread at a time drives a push"),
            };
            record.machine = Some(machine);
            if let Some(result) = ended {
                return Rest::Ended(result, record);
            }
        }
    }

    /// Carries one action out and reports it to the machine. An error ends the push as it stands, with nothing
    /// reserved and nothing written.
    fn act(
        &mut self,
        action: PushAction,
        record: &mut Record,
        machine: &mut PushMachine,
    ) -> Result<(), PushError> {
        match action {
            PushAction::Reserve {
                transfer_id,
                timeout_ms,
            } => {
                record.first_reserve.get_or_insert_with(Instant::now);
                let until = Instant::now() + Duration::from_millis(timeout_ms);
                let request = record.request(transfer_id);
                let answer = match self.discover(&record.to, until)? {
                    PushAnswer::Reply(()) => {
                        self.ask(&record.to, until, Patience::UntilTimeout, |client| {
                            client.reserve(&request)
                        })?
                    }
                    PushAnswer::Refused { code, text } => PushAnswer::Refused { code, text },
                    // The reserve itself was not sent.
                    PushAnswer::Lost { cause, .. } => PushAnswer::Lost { sent: false, cause },
                    PushAnswer::BadReply { cause } => {
                        return Err(PushFailure::BadReply { cause }.into());
                    }
                };
                machine.handle_reserve(self.queue.now(), reserved(answer));
            }
            PushAction::Stage => {
                // Before the look, so that room that comes after it is not missed.
                record.room_seen = self.queue.room_count();
                let end = record.stage(&self.site.staging);
                machine.handle_staged(end);
            }
            PushAction::Write { session, address } => {
                let end = self.write(record, &session, address);
                if end != WriteEnd::Applied {
                    self.site.forget_segment(&session);
                }
                machine.handle_write(self.queue.now(), end);
            }
            PushAction::Complete {
                transfer_id,
                reservation_id,
                timeout_ms,
            } => {
                let until = Instant::now() + Duration::from_millis(timeout_ms);
                let answer = self.ask(&record.to, until, Patience::UntilTimeout, |client| {
                    client.complete(&transfer_id, &reservation_id)
                })?;
                machine.handle_complete(self.queue.now(), answer);
            }
            PushAction::Status {
                transfer_id,
                timeout_ms,
            } => {
                let until = Instant::now() + Duration::from_millis(timeout_ms);
                let answer = self.ask(&record.to, until, Patience::UntilTimeout, |client| {
                    client.status(&transfer_id)
                })?;
                let answer = map(answer, |status| status.map(|status| status.ready));
                machine.handle_status(self.queue.now(), answer);
            }
            PushAction::Cancel {
                transfer_id,
                reservation_id,
                kind,
                timeout_ms,
            } => {
                let until = Instant::now() + Duration::from_millis(timeout_ms);
                // A consumer that is gone has forgotten the reservation.
                let answer = self.ask(&record.to, until, Patience::WhileItAnswers, |client| {
                    client.cancel(&transfer_id, reservation_id.as_deref(), kind)
                })?;
                machine.handle_cancel(self.queue.now(), answer);
            }
        }
        Ok(())
    }

    /// Learns the consumer's shards, unless they are known.
    fn discover(
        &mut self,
        consumer: &ControlAddress,
        until: Instant,
    ) -> Result<PushAnswer<()>, PushError> {
        if self.site.shard(consumer).is_some() {
            return Ok(PushAnswer::Reply(()));
        }
        let answer = self.ask(
            consumer,
            until,
            Patience::UntilTimeout,
            ControlClient::peers,
        )?;
        Ok(match answer {
            PushAnswer::Reply(ports) => {
                let &[port] = ports.as_slice() else {
                    return Err(PushError::Shards { count: ports.len() });
                };
                self.site
                    .remember_shard(consumer.clone(), consumer.with_port(port));
                PushAnswer::Reply(())
            }
            PushAnswer::Refused { code, text } => PushAnswer::Refused { code, text },
            PushAnswer::Lost { sent, cause } => PushAnswer::Lost { sent, cause },
            PushAnswer::BadReply { cause } => PushAnswer::BadReply { cause },
        })
    }

    /// Sends one request to the consumer's shard and sorts the result.
    fn ask<T>(
        &mut self,
        consumer: &ControlAddress,
        until: Instant,
        patience: Patience,
        request: impl FnOnce(&mut ControlClient) -> Result<T, ClientError>,
    ) -> Result<PushAnswer<T>, PushError> {
        let shard = self
            .site
            .shard(consumer)
            .unwrap_or_else(|| consumer.clone());
        // Zero would mean not to wait at all.
        let timeout = until
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1));
        let client = self.clients.get(&shard, timeout);
        client.set_fail_fast(patience == Patience::WhileItAnswers);
        let error = match request(client) {
            Ok(reply) => return Ok(PushAnswer::Reply(reply)),
            Err(ClientError::Refused(Refusal { code, text })) => {
                return Ok(PushAnswer::Refused { code, text });
            }
            Err(error) => error,
        };
        self.site.forget_shard(consumer);
        tracing::debug!(peer = %consumer, %error, "no reply from the consumer");
        let sent = error.may_have_been_applied();
        Ok(match error {
            ClientError::BadReply { .. } => PushAnswer::BadReply {
                cause: error.into(),
            },
            _ => PushAnswer::Lost {
                sent,
                cause: error.into(),
            },
        })
    }

    fn write(&self, record: &mut Record, session: &str, address: u64) -> WriteEnd {
        let Bytes::Staged(staged) = &record.bytes else {
            unreachable!("a push writes what it has staged");
        };
        let staged = staged.clone();
        let begin = |error: EngineError| WriteEnd::Ended {
            cause: Cause::new(WriteError::Begin(error)),
        };
        let segment = match self.site.segment(session) {
            Ok(segment) => segment,
            // As with a write: it has too many connections.
            Err(
                error @ EngineError::Control {
                    source: ControlError::Closed,
                    ..
                },
            ) => {
                return WriteEnd::Closed {
                    cause: Cause::new(WriteError::Begin(error)),
                };
            }
            Err(error) => return begin(error),
        };
        let len = staged.range.end - staged.range.start;
        let task = Task {
            op: Op::Write,
            segment,
            remote: address,
            memory: staged.memory,
            range: staged.range,
            hold: Box::new(staged.hold),
        };
        let batch = match self.site.engine.submit(vec![task]) {
            Ok(batch) => batch,
            Err(refused) => return begin(refused.cause),
        };
        // Every task settles within the engine's own deadlines.
        let report = batch.wait(None);
        let settled = report.as_ref().and_then(|report| report.tasks().first());
        let task = |reason| Cause::new(WriteError::Task(reason));
        match settled.map(|settled| settled.remote.clone()) {
            Some(Remote::Applied) => {
                record.wire_bytes += len;
                WriteEnd::Applied
            }
            Some(Remote::Ended(reason @ Reason::Closed)) => WriteEnd::Closed {
                cause: task(reason),
            },
            Some(Remote::Ended(reason)) => WriteEnd::Ended {
                cause: task(reason),
            },
            Some(Remote::Unknown(reason)) => WriteEnd::Unknown {
                cause: task(reason),
            },
            // An engine that reports on no task has lost it.
            None => WriteEnd::Unknown {
                cause: task(Reason::Lost),
            },
        }
    }
}

fn map<T, U>(answer: PushAnswer<T>, f: impl FnOnce(T) -> U) -> PushAnswer<U> {
    match answer {
        PushAnswer::Reply(reply) => PushAnswer::Reply(f(reply)),
        PushAnswer::Refused { code, text } => PushAnswer::Refused { code, text },
        PushAnswer::Lost { sent, cause } => PushAnswer::Lost { sent, cause },
        PushAnswer::BadReply { cause } => PushAnswer::BadReply { cause },
    }
}

fn reserved(answer: PushAnswer<RemoteReserve>) -> PushAnswer<Reserved> {
    map(answer, |reply| match reply {
        RemoteReserve::Granted {
            reservation_id,
            session,
            address,
            len_bytes,
            write,
            ready,
            ..
        } => Reserved::Granted {
            reservation_id,
            session,
            address,
            len_bytes,
            write,
            ready,
        },
        RemoteReserve::Cancelled => Reserved::Cancelled,
    })
}
