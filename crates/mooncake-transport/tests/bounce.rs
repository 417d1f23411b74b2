//! Memory that the host cannot address goes through bounces, and is reported only once in place.
#![cfg(feature = "tcp")]
// `Memory` is unsafe to implement; these promise nothing about host pointers, for they have none.
#![allow(unsafe_code)]

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mooncake_transport::tcp::TcpEngine;
use mooncake_transport::wire::data::Status;
use mooncake_transport::{Access, Engine, EngineError, Op, Reason, Remote, Segment, Task};
use slab_memory::{Bounce, BounceDirection, CopyError, Memory, MemoryKind};
use support::{engine, engine_with, finish, pattern, run_one, slab};

const LEN: u64 = 4 << 20;

/// How long a copy of the device takes, counted in how often it is asked.
const POLLS_PER_COPY: u64 = 3;

/// A device as far as an engine can tell: bytes behind copies that take their time.
struct Device {
    address: u64,
    bytes: Mutex<Vec<u8>>,
    asynchronous: bool,
    /// Copies fail from now on.
    broken: AtomicBool,
    /// Bounces are refused from now on.
    refusing: AtomicBool,
    /// Copies panic from now on, and so does the end of a bounce.
    panicking: AtomicBool,
    copies: AtomicU64,
}

impl Device {
    fn new(address: u64, asynchronous: bool) -> Arc<Self> {
        Arc::new(Self {
            address,
            bytes: Mutex::new(vec![0; LEN as usize]),
            asynchronous,
            broken: AtomicBool::new(false),
            refusing: AtomicBool::new(false),
            panicking: AtomicBool::new(false),
            copies: AtomicU64::new(0),
        })
    }

    fn range(&self, offset: u64, len: usize) -> Result<Range<usize>, CopyError> {
        self.copies.fetch_add(1, Ordering::SeqCst);
        assert!(!self.panicking.load(Ordering::SeqCst), "a copy of the test");
        if self.broken.load(Ordering::SeqCst) {
            return Err(CopyError::Driver { code: 700 });
        }
        let start = offset as usize;
        if start + len > LEN as usize {
            return Err(CopyError::OutOfBounds {
                offset,
                len: len as u64,
                memory_len: LEN,
            });
        }
        Ok(start..start + len)
    }
}

// SAFETY: length, kind and address are constant, the address range does not wrap, and there is no
// host pointer.
unsafe impl Memory for Device {
    fn len(&self) -> u64 {
        LEN
    }
    fn kind(&self) -> MemoryKind {
        MemoryKind::Device(0)
    }
    fn address(&self) -> u64 {
        self.address
    }
    fn host_ptr(&self) -> Option<NonNull<u8>> {
        None
    }
    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<(), CopyError> {
        let range = self.range(offset, source.len())?;
        self.bytes.lock().unwrap()[range].copy_from_slice(source);
        Ok(())
    }
    fn copy_out(&self, offset: u64, target: &mut [u8]) -> Result<(), CopyError> {
        let range = self.range(offset, target.len())?;
        target.copy_from_slice(&self.bytes.lock().unwrap()[range]);
        Ok(())
    }
    fn bounce(
        self: Arc<Self>,
        direction: BounceDirection,
        range: Range<u64>,
    ) -> Result<Box<dyn Bounce>, CopyError> {
        if self.refusing.load(Ordering::SeqCst) {
            return Err(CopyError::Driver { code: 2 });
        }
        if self.asynchronous {
            Ok(Box::new(Slow {
                device: self,
                direction,
                rest: range,
                buffer: vec![0; 9_999],
                copying: None,
                filled: 0..0,
            }))
        } else {
            Ok(Box::new(slab_memory::BlockingBounce::new(
                self, direction, range,
            )?))
        }
    }
}

/// A bounce whose copies run for a while after they were started.
struct Slow {
    device: Arc<Device>,
    direction: BounceDirection,
    rest: Range<u64>,
    buffer: Vec<u8>,
    /// Bytes of the copy under way, and how often it will still say that it is.
    copying: Option<(usize, u64)>,
    filled: Range<usize>,
}

impl Drop for Slow {
    fn drop(&mut self) {
        let panicking = self.device.panicking.load(Ordering::SeqCst);
        assert!(!panicking, "the end of a bounce of the test");
    }
}

impl Slow {
    /// Lets the copy under way go on; says whether there is none any more.
    fn advance(&mut self) -> Result<bool, CopyError> {
        match &mut self.copying {
            None => Ok(true),
            Some((_, polls)) if *polls > 0 => {
                *polls -= 1;
                Ok(false)
            }
            Some((len, _)) => {
                let len = *len;
                self.copying = None;
                match self.direction {
                    BounceDirection::In => {
                        self.device.copy_in(self.rest.start, &self.buffer[..len])?
                    }
                    _ => {
                        self.device
                            .copy_out(self.rest.start, &mut self.buffer[..len])?;
                        self.filled = 0..len;
                    }
                }
                self.rest.start += len as u64;
                Ok(true)
            }
        }
    }

    fn room(&self) -> usize {
        ((self.rest.end - self.rest.start) as usize).min(self.buffer.len())
    }
}

impl Bounce for Slow {
    fn buffer(&mut self) -> Result<&mut [u8], CopyError> {
        if !self.advance()? {
            return Ok(&mut []);
        }
        if self.direction == BounceDirection::In {
            let room = self.room();
            return Ok(&mut self.buffer[..room]);
        }
        if self.filled.is_empty() && !self.rest.is_empty() {
            self.copying = Some((self.room(), POLLS_PER_COPY));
            return Ok(&mut []);
        }
        Ok(&mut self.buffer[self.filled.clone()])
    }

    fn commit(&mut self, count: usize) -> Result<(), CopyError> {
        match self.direction {
            BounceDirection::In => self.copying = Some((count, POLLS_PER_COPY)),
            _ => self.filled.start += count,
        }
        Ok(())
    }

    fn poll_finished(&mut self) -> Result<bool, CopyError> {
        Ok(self.advance()? && self.rest.is_empty() && self.filled.is_empty())
    }
}

fn device_task(
    op: Op,
    segment: &Segment,
    remote: u64,
    device: &Arc<Device>,
    range: Range<u64>,
) -> Task {
    let memory: Arc<dyn Memory> = device.clone();
    Task {
        op,
        segment: segment.clone(),
        remote,
        memory,
        range,
        hold: Box::new(()),
    }
}

fn check_round_trip(asynchronous: bool) {
    let (source, target) = (engine(), engine());
    let there = Device::new(0x7_0000_0000, asynchronous);
    let here = Device::new(0x8_0000_0000, asynchronous);
    let back = slab(LEN);
    let _registration = target.register(there.clone(), Access::RemoteWrite).unwrap();
    let segment = source.open_segment(target.session()).unwrap();
    for (seed, len) in [1, 8, 9_998, 9_999, 10_000, 300_001]
        .into_iter()
        .enumerate()
    {
        let bytes = pattern(seed as u64, len);
        here.copy_in(17, &bytes).unwrap();
        let range = 17..17 + len as u64;
        let remote = there.address + 33;
        let write = device_task(Op::Write, &segment, remote, &here, range.clone());
        assert_eq!(run_one(&source, write), Remote::Applied, "write of {len}");
        let mut found = vec![0; len];
        there.copy_out(33, &mut found).unwrap();
        assert!(found == bytes, "write of {len}");

        here.copy_in(17, &vec![0; len]).unwrap();
        let read = device_task(Op::Read, &segment, remote, &here, range);
        assert_eq!(run_one(&source, read), Remote::Applied, "read of {len}");
        here.copy_out(17, &mut found).unwrap();
        assert!(found == bytes, "read of {len}");

        // Device on one side only.
        let read = support::task(Op::Read, &segment, remote, &back, 0..len as u64);
        assert_eq!(run_one(&source, read), Remote::Applied);
        assert!(support::bytes(&back, 0, len) == bytes);
    }
}

#[test]
fn device_memory_is_read_and_written_through_blocking_copies() {
    check_round_trip(false);
}

#[test]
fn device_memory_is_read_and_written_through_copies_that_take_their_time() {
    check_round_trip(true);
}

#[test]
fn memory_at_an_address_that_peers_cannot_name_is_not_registered_for_them() {
    let engine = engine();
    let nameless = Device::new(0, true);
    for access in [Access::RemoteRead, Access::RemoteWrite] {
        let error = engine.register(nameless.clone(), access).unwrap_err();
        let (address, len) = (0, LEN);
        assert_eq!(error, EngineError::UnusableMemory { address, len });
    }
    // The initiator itself needs no name for it.
    engine
        .register(nameless, Access::Local)
        .unwrap()
        .unregister()
        .unwrap();
}

#[test]
fn a_device_that_fails_at_the_target_closes_the_connection_and_not_the_engine() {
    let (source, target) = (engine(), engine());
    let there = Device::new(0x7_0000_0000, true);
    let local = slab(LEN);
    let _registration = target.register(there.clone(), Access::RemoteWrite).unwrap();
    let segment = source.open_segment(target.session()).unwrap();
    there.broken.store(true, Ordering::SeqCst);
    for op in [Op::Write, Op::Read] {
        let failing = support::task(op, &segment, there.address, &local, 0..100_000);
        assert_eq!(run_one(&source, failing), Remote::Ended(Reason::Closed));
    }
    there.broken.store(false, Ordering::SeqCst);
    let working = support::task(Op::Write, &segment, there.address, &local, 0..100_000);
    assert_eq!(run_one(&source, working), Remote::Applied);
}

/// Log lines of warnings and errors with the address of a device in them.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl Lines {
    /// Those about the memory at `address`; all of the process are looked at, for engines log on threads of their own.
    fn about(&self, address: u64) -> Vec<String> {
        let wanted = format!("address={address} ");
        let lines = self.0.lock().unwrap();
        let about = lines.iter().filter(|line| line.contains(&wanted));
        about.cloned().collect()
    }
}

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct Fields(String);
        impl tracing::field::Visit for Fields {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0.push_str(&format!("{}={value:?} ", field.name()));
            }
        }
        let mut fields = Fields(format!("{} ", event.metadata().level()));
        event.record(&mut fields);
        self.0.lock().unwrap().push(fields.0);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn what_a_device_at_the_target_fails_of_is_logged() {
    let lines = Lines::default();
    tracing::subscriber::set_global_default(lines.clone()).unwrap();
    // Where a copy fails: at once, while it is waited for, or before it could be started.
    let cases = [(Op::Write, 5), (Op::Write, 100_000), (Op::Read, 100_000)];
    for (at, (op, len)) in (0x9_0000_0000..).step_by(LEN as usize).zip(cases) {
        let (source, target) = (engine(), engine());
        let there = Device::new(at, true);
        let local = slab(LEN);
        let _registration = target.register(there.clone(), Access::RemoteWrite).unwrap();
        let segment = source.open_segment(target.session()).unwrap();
        let request = || {
            let task = support::task(op, &segment, there.address, &local, 0..len);
            run_one(&source, task)
        };
        there.broken.store(true, Ordering::SeqCst);
        assert_eq!(request(), Remote::Ended(Reason::Closed));
        let said = lines.about(at);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].starts_with("ERROR "), "{said:?}");
        assert!(said[0].contains("a copy of a peer's request has failed"));
        for field in [
            format!("op={op:?} address={at} len={len} "),
            "error=the driver failed the copy with code 700 ".to_owned(),
            "peer=Some(127.0.0.1:".to_owned(),
        ] {
            assert!(said[0].contains(&field), "{field} is not in {said:?}");
        }
        // The next ones are counted; a bounce that is refused is another matter.
        assert_eq!(request(), Remote::Ended(Reason::Closed));
        there.refusing.store(true, Ordering::SeqCst);
        assert_eq!(request().reason(), Some(&Reason::Rejected));
        let said = lines.about(at);
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[1].starts_with("WARN "), "{said:?}");
        assert!(said[1].contains("the memory has no bounce to give"));
        assert!(said[1].contains("code 2 "), "{said:?}");
    }
}

#[test]
fn a_device_that_fails_at_the_initiator_fails_its_task_alone() {
    let (source, target) = (engine(), engine());
    let here = Device::new(0x8_0000_0000, true);
    let (remote, local) = (slab(LEN), slab(LEN));
    let _registration = support::register(&target, &remote);
    let segment = source.open_segment(target.session()).unwrap();
    here.broken.store(true, Ordering::SeqCst);
    for op in [Op::Write, Op::Read] {
        let tasks = vec![
            device_task(op, &segment, remote.address(), &here, 0..100_000),
            support::task(
                op,
                &segment,
                remote.address() + (1 << 20),
                &local,
                0..100_000,
            ),
        ];
        let report = finish(&source.submit(tasks).unwrap());
        let failure = &report.tasks()[0].remote;
        assert_eq!(
            failure.reason(),
            Some(&Reason::Memory {
                source: CopyError::Driver { code: 700 }
            }),
            "{failure:?}"
        );
        assert_eq!(report.tasks()[1].remote, Remote::Applied);
    }
}

#[test]
fn a_device_whose_code_panics_fails_its_requests_and_leaves_the_engines_alone() {
    let (source, target) = (engine(), engine());
    let there = Device::new(0x7_0000_0000, true);
    let here = Device::new(0x8_0000_0000, true);
    let (remote, local) = (slab(LEN), slab(LEN));
    let at_device = target.register(there.clone(), Access::RemoteWrite).unwrap();
    let at_slab = support::register(&target, &remote);
    let segment = source.open_segment(target.session()).unwrap();
    there.panicking.store(true, Ordering::SeqCst);
    here.panicking.store(true, Ordering::SeqCst);
    for op in [Op::Write, Op::Read] {
        let at_target = support::task(op, &segment, there.address, &local, 0..100_000);
        assert_eq!(run_one(&source, at_target), Remote::Ended(Reason::Closed));
        let at_source = device_task(op, &segment, remote.address(), &here, 0..100_000);
        let failure = run_one(&source, at_source);
        let panicked = Reason::Memory {
            source: CopyError::Panicked,
        };
        assert_eq!(failure.reason(), Some(&panicked), "{failure:?}");
        let working = support::task(op, &segment, remote.address(), &local, 0..100_000);
        assert_eq!(run_one(&source, working), Remote::Applied);
    }
    // Their threads are still there to end what touches the memory.
    at_device.unregister().unwrap();
    at_slab.unregister().unwrap();
    assert_eq!(Arc::strong_count(&here), 1);
}

/// Begins a write of five bytes, of which it sends `count`.
fn begin_write(target: &TcpEngine, address: u64, count: usize) -> TcpStream {
    let mut stream = support::dial(target.data_address());
    stream
        .write_all(&support::header(Op::Write, address, 5))
        .unwrap();
    stream.write_all(&b"hello"[..count]).unwrap();
    stream
}

#[test]
fn requests_beyond_the_limit_of_bounces_wait_for_one_to_end() {
    let target = engine_with(|config| config.limits.bounces_max = 2);
    let there = Device::new(0x7_0000_0000, true);
    let remote = slab(4096);
    let _at_device = target.register(there.clone(), Access::RemoteWrite).unwrap();
    let _at_slab = support::register(&target, &remote);
    let mut first = begin_write(&target, there.address, 2);
    let second = begin_write(&target, there.address, 2);
    std::thread::sleep(Duration::from_millis(100));
    let mut waiting: Vec<_> = (0..4)
        .map(|_| begin_write(&target, there.address, 5))
        .collect();
    for stream in &mut waiting {
        stream
            .set_read_timeout(Some(Duration::from_millis(50)))
            .unwrap();
        assert!(stream.read(&mut [0; 8]).is_err(), "there was no room");
        stream.set_read_timeout(Some(support::LONG)).unwrap();
    }
    // What the host can address needs none.
    let mut host = begin_write(&target, remote.address(), 5);
    assert_eq!(support::read_status(&mut host), Status::Ok);
    // One that ends and one that is closed make room for all.
    first.write_all(b"llo").unwrap();
    assert_eq!(support::read_status(&mut first), Status::Ok);
    drop(waiting.pop());
    drop(second);
    for stream in &mut waiting {
        assert_eq!(support::read_status(stream), Status::Ok);
    }
}

#[test]
fn tasks_beyond_the_limit_of_bounces_wait_for_one_to_end() {
    let source = engine_with(|config| config.limits.bounces_max = 1);
    let target = engine();
    let here = Device::new(0x8_0000_0000, true);
    let remote = slab(LEN);
    let _registration = support::register(&target, &remote);
    let segment = source.open_segment(target.session()).unwrap();
    for op in [Op::Write, Op::Read] {
        let tasks = (0..20)
            .map(|_| device_task(op, &segment, remote.address(), &here, 0..100_000))
            .collect();
        assert!(finish(&source.submit(tasks).unwrap()).is_applied());
    }
}

#[test]
fn a_request_that_waits_for_a_bounce_waits_no_longer_than_its_deadline() {
    let target = engine_with(|config| {
        config.limits.bounces_max = 1;
        config.timeouts.progress = Duration::from_millis(800);
    });
    let there = Device::new(0x7_0000_0000, true);
    let _registration = target.register(there.clone(), Access::RemoteWrite).unwrap();
    let mut holding = begin_write(&target, there.address, 1);
    std::thread::sleep(Duration::from_millis(50));
    let mut waiting = begin_write(&target, there.address, 5);
    let start = Instant::now();
    // The one that has it moves, so that it keeps it.
    for byte in b"ell" {
        std::thread::sleep(Duration::from_millis(500));
        holding.write_all(&[*byte]).unwrap();
    }
    assert!(support::read_to_close(&mut waiting).is_empty());
    assert!(start.elapsed() < Duration::from_secs(10));
    holding.write_all(b"o").unwrap();
    assert_eq!(support::read_status(&mut holding), Status::Ok);
}

// row: W7.3a
#[test]
fn a_write_to_a_device_is_acknowledged_only_once_its_copy_has_ended() {
    let target = engine();
    let there = Device::new(0x7_0000_0000, true);
    let _registration = target.register(there.clone(), Access::RemoteWrite).unwrap();
    let mut stream = support::dial(target.data_address());
    for round in 0..20 {
        stream
            .write_all(&support::header(Op::Write, there.address, 5))
            .unwrap();
        stream.write_all(&[round; 5]).unwrap();
        let mut status = [0; 8];
        stream.read_exact(&mut status).unwrap();
        let mut found = [0; 5];
        there.copy_out(0, &mut found).unwrap();
        assert_eq!(found, [round; 5]);
    }
    std::thread::sleep(Duration::from_millis(5));
    assert!(there.copies.load(Ordering::SeqCst) >= 20);
}
