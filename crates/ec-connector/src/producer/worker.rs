//! What the producer's threads do: carry out the actions of push records.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use mooncake_transport::{ControlError, Engine, EngineError, Op, Reason, Remote, Segment, Task};

use super::PushError;
use super::queue::{Queue, Record};
use crate::control::{
    ClientError, ControlAddress, ControlClient, ControlContext, Refusal, RemoteReserve,
};
use crate::push::{PushAction, PushAnswer, PushMachine, PushStep, Reserved, WriteEnd};
use crate::staging::{StageError, Staging};

/// What the threads of a producer share.
pub(super) struct Site {
    engine: Arc<dyn Engine>,
    staging: Staging,
    context: ControlContext,
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
    pub(super) fn new(engine: Arc<dyn Engine>, staging: Staging, context: ControlContext) -> Self {
        Self {
            engine,
            staging,
            context,
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
        clients: HashMap::new(),
    };
    while let Some(record) = queue.next() {
        let lane = record.lane();
        // A defect that shows with one push must not take the thread from the others.
        if catch_unwind(AssertUnwindSafe(|| worker.drive(record))).is_err() {
            tracing::error!("a push was lost to a panic");
            // A request may have been under way: its socket cannot be used again.
            worker.clients.clear();
            queue.lose(&lane);
        }
    }
}

struct Worker<'a> {
    queue: &'a Queue,
    site: &'a Site,
    /// Request sockets belong to one thread each.
    clients: HashMap<ControlAddress, ControlClient>,
}

impl Worker<'_> {
    /// Carries a push on until it has to wait or has ended.
    fn drive(&mut self, mut record: Record) {
        loop {
            let mut machine = self.queue.machine(&mut record);
            let step = machine.poll(self.queue.now(), || self.queue.ids().transfer_id());
            match step {
                PushStep::Do(action) => {
                    let ended = self.act(action, &mut record, &mut machine);
                    record.machine = Some(machine);
                    if let Err(error) = ended {
                        return self.queue.end(record, Err(error));
                    }
                }
                PushStep::WaitUntil(at) => {
                    record.machine = Some(machine);
                    return self.queue.wait_until(at, record);
                }
                PushStep::Done(outcome) => {
                    record.machine = Some(machine);
                    let result = outcome.result.map_err(PushError::Failed);
                    return self.queue.end(record, result);
                }
                PushStep::InProgress => unreachable!("one thread at a time drives a push"),
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
                    PushAnswer::Lost { .. } => PushAnswer::Lost { sent: false },
                };
                machine.handle_reserve(self.queue.now(), reserved(answer));
            }
            PushAction::Stage => {
                // A region comes free as soon as another push ends, which takes no longer than this.
                let deadline = Instant::now() + STAGING_WAIT;
                let staged = match record.source.take() {
                    Some(source) => self.site.staging.stage(source, deadline),
                    None => Err(StageError::Full { len: 0 }),
                };
                match staged {
                    Ok(staged) => {
                        record.staged = Some(staged);
                        machine.handle_staged(true);
                    }
                    Err(error) => {
                        record.error = Some(PushError::Stage(Arc::new(error)));
                        machine.handle_staged(false);
                    }
                }
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
            PushAnswer::Lost { sent } => PushAnswer::Lost { sent },
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
        if self.clients.len() >= CONSUMERS_MAX && !self.clients.contains_key(&shard) {
            self.clients.clear();
        }
        // Zero would mean not to wait at all.
        let timeout = until
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1));
        let client = self
            .clients
            .entry(shard.clone())
            .or_insert_with(|| ControlClient::new(&self.site.context, shard, timeout));
        client.set_timeout(timeout);
        client.set_fail_fast(patience == Patience::WhileItAnswers);
        match request(client) {
            Ok(reply) => Ok(PushAnswer::Reply(reply)),
            Err(ClientError::Refused(Refusal { code, text })) => {
                Ok(PushAnswer::Refused { code, text })
            }
            Err(error) => {
                self.site.forget_shard(consumer);
                tracing::debug!(peer = %consumer, %error, "no reply from the consumer");
                Ok(PushAnswer::Lost {
                    sent: error.may_have_been_applied(),
                })
            }
        }
    }

    fn write(&self, record: &mut Record, session: &str, address: u64) -> WriteEnd {
        let ended = |error: EngineError| WriteEnd::Ended {
            reason: chain(&error),
        };
        let Some(staged) = record.staged.clone() else {
            return WriteEnd::Ended {
                reason: "nothing was staged".to_owned(),
            };
        };
        let segment = match self.site.segment(session) {
            Ok(segment) => segment,
            // As with a write: it has too many connections.
            Err(EngineError::Control {
                source: source @ ControlError::Closed,
                ..
            }) => {
                return WriteEnd::Closed {
                    reason: chain(&source),
                };
            }
            Err(error) => return ended(error),
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
            Err(refused) => return ended(refused.cause),
        };
        // Every task settles within the engine's own deadlines.
        let report = batch.wait(None);
        match report.as_ref().and_then(|report| report.tasks().first()) {
            Some(settled) => match &settled.remote {
                Remote::Applied => {
                    record.wire_bytes += len;
                    WriteEnd::Applied
                }
                Remote::Ended(reason @ Reason::Closed) => WriteEnd::Closed {
                    reason: chain(reason),
                },
                Remote::Ended(reason) => WriteEnd::Ended {
                    reason: chain(reason),
                },
                Remote::Unknown(reason) => WriteEnd::Unknown {
                    reason: chain(reason),
                },
            },
            None => WriteEnd::Unknown {
                reason: "the engine gave no report".to_owned(),
            },
        }
    }
}

/// Longest wait for room in the staging slab. Regions come free when writes end, which the engine bounds.
const STAGING_WAIT: Duration = Duration::from_secs(60);

fn map<T, U>(answer: PushAnswer<T>, f: impl FnOnce(T) -> U) -> PushAnswer<U> {
    match answer {
        PushAnswer::Reply(reply) => PushAnswer::Reply(f(reply)),
        PushAnswer::Refused { code, text } => PushAnswer::Refused { code, text },
        PushAnswer::Lost { sent } => PushAnswer::Lost { sent },
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

/// An error with its sources on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
