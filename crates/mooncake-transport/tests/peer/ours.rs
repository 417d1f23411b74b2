//! Our side of the tests with a real engine: an engine, a slab, and short
//! forms of what the tests do with them.
#![allow(dead_code, reason = "every test target uses its own part")]

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::{
    Access, Batch, BatchReport, Engine, Op, Reason, Registration, Remote, Segment, Task,
};
use slab_memory::HostSlab;

use crate::stream;

/// No transfer of these tests takes a tenth of this on a loaded machine.
const LIMIT: Duration = Duration::from_secs(120);

/// Our engine with one slab.
pub(crate) struct Ours {
    pub(crate) engine: TcpEngine,
    pub(crate) slab: Arc<HostSlab>,
}

impl Ours {
    /// An engine on loopback and a slab of `len` bytes, not registered.
    pub(crate) fn new(len: u64) -> Self {
        Self::with_config(len, TcpConfig::default())
    }

    pub(crate) fn with_config(len: u64, config: TcpConfig) -> Self {
        let engine = TcpEngine::start(config).expect("our engine starts");
        let slab = Arc::new(HostSlab::new(len).expect("memory for the slab"));
        Self { engine, slab }
    }

    pub(crate) fn register(&self, access: Access) -> Registration {
        self.engine
            .register(self.slab.clone(), access)
            .expect("the slab can be registered")
    }

    /// Fills a range with bytes of a seed, from the start of its stream.
    pub(crate) fn fill(&self, range: Range<u64>, seed: u64) {
        let len = usize::try_from(range.end - range.start).unwrap();
        self.slab
            .copy_in(range.start, &stream::bytes(seed, 0, len))
            .unwrap();
    }

    /// Asserts that a range holds bytes of a seed, from `start` of its stream.
    #[track_caller]
    pub(crate) fn assert_holds(&self, range: Range<u64>, seed: u64, start: u64) {
        let mut found = vec![0; usize::try_from(range.end - range.start).unwrap()];
        self.slab.copy_out(range.start, &mut found).unwrap();
        let expected = stream::bytes(seed, start, found.len());
        // Printing megabytes would help nobody.
        let at = found.iter().zip(&expected).position(|(a, b)| a != b);
        assert_eq!(at, None, "the bytes differ at this offset of {range:?}");
    }

    pub(crate) fn task(&self, op: Op, segment: &Segment, remote: u64, range: Range<u64>) -> Task {
        let memory = self.slab.clone();
        Task {
            op,
            segment: segment.clone(),
            remote,
            memory,
            range,
            hold: Box::new(()),
        }
    }

    pub(crate) fn submit(&self, tasks: Vec<Task>) -> Batch {
        self.engine
            .submit(tasks)
            .map_err(|refused| refused.cause)
            .expect("the batch is accepted")
    }

    /// One transfer, to its end.
    pub(crate) fn transfer(
        &self,
        op: Op,
        segment: &Segment,
        remote: u64,
        range: Range<u64>,
    ) -> Remote {
        let batch = self.submit(vec![self.task(op, segment, remote, range)]);
        settled(&batch).tasks()[0].remote.clone()
    }
}

/// Waits for a batch.
#[track_caller]
pub(crate) fn settled(batch: &Batch) -> BatchReport {
    batch
        .wait(Some(Instant::now() + LIMIT))
        .expect("the batch settles in time")
}

#[track_caller]
pub(crate) fn assert_applied(remote: &Remote) {
    assert!(remote.is_applied(), "{remote:?}");
}

#[track_caller]
pub(crate) fn assert_rejected(remote: &Remote) {
    assert!(
        matches!(remote, Remote::Ended(Reason::Rejected)),
        "{remote:?}"
    );
}

/// Asks `check` until it says yes.
#[track_caller]
pub(crate) fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !check() {
        assert!(begin.elapsed() < Duration::from_secs(30), "in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
