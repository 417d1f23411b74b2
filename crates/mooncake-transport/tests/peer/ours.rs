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

use crate::harness::{Memory, Peer};
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

/// Bytes on either side of a range; odd, so that nothing is aligned.
pub(crate) const GUARD: u64 = 4_099;

/// What lies in the memory that is written, before and around the range.
pub(crate) const BACKGROUND: u64 = 11;

/// What is transferred.
pub(crate) const CONTENT: u64 = 0xFEED_F00D_0000_0007;

/// Memory at the real engine, registered: background, with the content in the middle if it is the source.
pub(crate) fn peer_memory(peer: &mut Peer, len: u64, has_content: bool) -> Memory {
    let memory = peer.allocate(len + 2 * GUARD, BACKGROUND);
    if has_content {
        peer.fill(memory, GUARD, len, CONTENT, 0);
    }
    assert_eq!(peer.register(memory), 0);
    memory
}

/// The same on our side, not registered.
pub(crate) fn our_memory(len: u64, has_content: bool) -> Ours {
    let ours = Ours::new(len + 2 * GUARD);
    ours.fill(0..len + 2 * GUARD, BACKGROUND);
    if has_content {
        ours.fill(GUARD..GUARD + len, CONTENT);
    }
    ours
}

/// The real engine looks at its memory: the content between untouched guards.
#[track_caller]
pub(crate) fn assert_peer_holds_content(peer: &mut Peer, memory: Memory, len: u64) {
    peer.assert_holds(memory, 0, GUARD, BACKGROUND, 0);
    peer.assert_holds(memory, GUARD, len, CONTENT, 0);
    peer.assert_holds(memory, GUARD + len, GUARD, BACKGROUND, GUARD + len);
}

#[track_caller]
pub(crate) fn assert_we_hold_content(ours: &Ours, len: u64) {
    ours.assert_holds(0..GUARD, BACKGROUND, 0);
    ours.assert_holds(GUARD..GUARD + len, CONTENT, 0);
    ours.assert_holds(GUARD + len..GUARD + len + GUARD, BACKGROUND, GUARD + len);
}

/// A slab that holds the bytes of a seed.
pub(crate) fn filled(len: u64, seed: u64) -> Arc<HostSlab> {
    let slab = Arc::new(HostSlab::new(len).unwrap());
    let bytes = stream::bytes(seed, 0, usize::try_from(len).unwrap());
    slab.copy_in(0, &bytes).unwrap();
    slab
}

/// Says whether a slab holds the bytes of a seed.
pub(crate) fn holds(slab: &HostSlab, seed: u64) -> bool {
    let mut found = vec![0; usize::try_from(slab.len()).unwrap()];
    slab.copy_out(0, &mut found).unwrap();
    found == stream::bytes(seed, 0, found.len())
}

/// Moves a whole slab, which has to succeed.
#[track_caller]
pub(crate) fn transfer(
    engine: &impl Engine,
    op: Op,
    segment: &Segment,
    remote: u64,
    memory: &Arc<HostSlab>,
) {
    let task = Task {
        op,
        segment: segment.clone(),
        remote,
        memory: memory.clone(),
        range: 0..memory.len(),
        hold: Box::new(()),
    };
    let batch = engine
        .submit(vec![task])
        .map_err(|refused| refused.cause)
        .expect("the batch is accepted");
    assert_applied(&settled(&batch).tasks()[0].remote);
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
