//! Everything the fake driver knows, behind one lock.

// Copies between allocations, some of which the test's process reads and writes through pointers of its own.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::capture::Captures;
use crate::stream::{Span, Streams, Work};

pub(crate) const SUCCESS: u32 = 0;
pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const NOT_INITIALIZED: u32 = 3;
pub(crate) const INVALID_DEVICE: u32 = 101;
pub(crate) const INVALID_CONTEXT: u32 = 201;
pub(crate) const INVALID_HANDLE: u32 = 400;
pub(crate) const NOT_READY: u32 = 600;
pub(crate) const CAPTURE_UNSUPPORTED: u32 = 900;
pub(crate) const CAPTURE_INVALIDATED: u32 = 901;
pub(crate) const CAPTURE_ISOLATION: u32 = 905;
pub(crate) const CAPTURED_EVENT: u32 = 907;

pub(crate) const DEVICES: i32 = 2;
/// Bytes of each device.
pub(crate) const DEVICE_BYTES: u64 = 1 << 30;
/// Device addresses begin here: above what a process can map, so that following one ends the process.
const DEVICE_BASE: u64 = 1 << 56;
/// Between two device allocations, so that running over the end of one does not hit the next.
const DEVICE_GAP: u64 = 1 << 21;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Device(i32),
    Pinned,
    Registered,
}

#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) len: u64,
    pub(crate) kind: Kind,
    /// Where kernels find registered memory.
    pub(crate) alias: Option<u64>,
    /// The bytes, unless the program owns them. Aligned for any type.
    bytes: Option<Box<[u128]>>,
}

impl Block {
    pub(crate) fn new(kind: Kind, len: u64) -> Self {
        let words = len.div_ceil(16) as usize;
        let bytes = (kind != Kind::Registered).then(|| vec![0; words].into_boxed_slice());
        Self {
            len,
            kind,
            alias: None,
            bytes,
        }
    }

    pub(crate) fn pointer(&mut self) -> *mut u8 {
        self.bytes
            .as_mut()
            .map_or(std::ptr::null_mut(), |bytes| bytes.as_mut_ptr().cast())
    }
}

/// How queued work gets on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Schedule {
    /// Only when told.
    Manual,
    /// As soon as it can.
    Immediate,
    /// A few pieces of random streams at every call.
    Seeded(u64),
}

/// A call that is to fail.
#[derive(Debug)]
struct Injection {
    symbol: String,
    /// Calls of it that still succeed before.
    spare: u64,
    /// Calls that fail then.
    count: u64,
    code: u32,
}

impl Injection {
    /// Reads `symbol:nth:count:code`.
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let symbol = parts.next()?.to_owned();
        let mut number = || parts.next()?.parse::<u64>().ok();
        let (nth, count, code) = (number()?, number()?, number()?);
        Some(Self {
            symbol,
            spare: nth.checked_sub(1)?,
            count,
            code: u32::try_from(code).ok()?,
        })
    }
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) initialised: bool,
    pub(crate) init_code: u32,
    pub(crate) version: i32,
    pub(crate) schedule: Schedule,
    pub(crate) blocks: BTreeMap<u64, Block>,
    /// Blocks that were freed while work touched them, kept for that work.
    graveyard: Vec<(u64, Block)>,
    pub(crate) lines: Streams,
    pub(crate) captures: Captures,
    /// Devices that have failed for good, and with what.
    pub(crate) broken: [Option<u32>; DEVICES as usize],
    pub(crate) contexts: [u32; DEVICES as usize],
    pub(crate) calls: HashMap<String, u64>,
    injections: Vec<Injection>,
    pub(crate) injected: u64,
    pub(crate) misuse: Vec<String>,
    says_misuse: bool,
    /// Recording an event does nothing, and says that it did.
    pub(crate) loses_records: bool,
    next_address: u64,
    next_handle: u64,
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);

/// Locks the world; the first call makes it.
pub(crate) fn lock() -> Held {
    let mut held = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    held.get_or_insert_with(World::new);
    Held(held)
}

/// The world, locked.
pub(crate) struct Held(MutexGuard<'static, Option<World>>);

impl std::ops::Deref for Held {
    type Target = World;
    fn deref(&self) -> &World {
        self.0.as_ref().expect("made when it was locked")
    }
}

impl std::ops::DerefMut for Held {
    fn deref_mut(&mut self) -> &mut World {
        self.0.as_mut().expect("made when it was locked")
    }
}

impl World {
    fn new() -> Self {
        let text = |name: &str| std::env::var(name).ok();
        Self {
            initialised: false,
            init_code: text("CUDA_FAKE_INIT").map_or(0, |code| code.parse().unwrap_or(999)),
            version: text("CUDA_FAKE_DRIVER_VERSION")
                .and_then(|v| v.parse().ok())
                .unwrap_or(13_000),
            schedule: match std::env::var("CUDA_FAKE_SCHEDULE").as_deref() {
                Ok("immediate") => Schedule::Immediate,
                Ok(text) => text.parse().map_or(Schedule::Manual, Schedule::Seeded),
                Err(_) => Schedule::Manual,
            },
            blocks: BTreeMap::new(),
            graveyard: Vec::new(),
            lines: Streams::default(),
            captures: Captures::default(),
            broken: [None; DEVICES as usize],
            contexts: [0; DEVICES as usize],
            calls: HashMap::new(),
            injections: text("CUDA_FAKE_FAIL")
                .and_then(|text| Injection::parse(&text))
                .into_iter()
                .collect(),
            injected: 0,
            misuse: Vec::new(),
            says_misuse: text("CUDA_FAKE_SAY").is_some(),
            loses_records: text("CUDA_FAKE_LOSE_RECORDS").is_some(),
            next_address: DEVICE_BASE,
            next_handle: 0x1000,
        }
    }

    /// Forgets everything but which addresses and handles were used, so that none is used again.
    pub(crate) fn reset(&mut self) {
        let (address, handle) = (self.next_address, self.next_handle);
        let initialised = self.initialised;
        *self = Self::new();
        self.initialised = initialised;
        (self.next_address, self.next_handle) = (address, handle);
    }

    /// Counts a call, and says whether it is to fail.
    pub(crate) fn enter(&mut self, symbol: &str) -> Result<(), u32> {
        *self.calls.entry(symbol.to_owned()).or_default() += 1;
        if let Schedule::Seeded(state) = &mut self.schedule {
            let mut random = *state;
            let turns = draw(&mut random) % 4;
            *state = random;
            for _ in 0..turns {
                self.advance_any();
            }
        }
        if !self.initialised && symbol != "cuInit" && symbol != "cuDriverGetVersion" {
            return Err(NOT_INITIALIZED);
        }
        if self.captures.refuse(symbol) {
            return Err(CAPTURE_UNSUPPORTED);
        }
        let Some(at) = self.injections.iter().position(|i| i.symbol == symbol) else {
            return Ok(());
        };
        let injection = &mut self.injections[at];
        if injection.spare > 0 {
            injection.spare -= 1;
            return Ok(());
        }
        let code = injection.code;
        injection.count -= 1;
        if injection.count == 0 {
            self.injections.remove(at);
        }
        self.injected += 1;
        Err(code)
    }

    pub(crate) fn inject(&mut self, symbol: String, nth: u64, count: u64, code: u32) {
        if nth > 0 && count > 0 {
            self.injections.push(Injection {
                symbol,
                spare: nth - 1,
                count,
                code,
            });
        }
    }

    pub(crate) fn clear_injections(&mut self) {
        self.injections.clear();
    }

    pub(crate) fn note(&mut self, misuse: String) {
        if self.says_misuse {
            eprintln!("misuse of the driver: {misuse}");
        }
        self.misuse.push(misuse);
    }

    pub(crate) fn handle(&mut self) -> u64 {
        self.next_handle += 16;
        self.next_handle
    }

    /// Makes a block and returns its address: none if the device has no room.
    pub(crate) fn allocate(&mut self, kind: Kind, len: u64) -> Option<u64> {
        if let Kind::Device(device) = kind
            && self.free_bytes(device) < len
        {
            return None;
        }
        let mut block = Block::new(kind, len);
        let address = match kind {
            Kind::Device(_) => self.new_address(len),
            _ => block.pointer().addr() as u64,
        };
        self.blocks.insert(address, block);
        Some(address)
    }

    /// Makes memory of the program's known.
    pub(crate) fn register(&mut self, span: Span) {
        let mut block = Block::new(Kind::Registered, span.len);
        block.alias = Some(self.new_address(span.len));
        self.blocks.insert(span.address, block);
    }

    fn new_address(&mut self, len: u64) -> u64 {
        let address = self.next_address;
        self.next_address += len.next_multiple_of(512) + DEVICE_GAP;
        address
    }

    /// The range by which the driver knows the bytes that kernels find at `span`.
    pub(crate) fn resolve(&self, span: Span) -> Span {
        let inside = |(address, block): (&u64, &Block)| {
            let offset = span.address.checked_sub(block.alias?)?;
            let fits = offset + span.len <= block.len;
            fits.then_some(Span {
                address: address + offset,
                ..span
            })
        };
        self.blocks.iter().find_map(inside).unwrap_or(span)
    }

    /// Breaks a device: every call fails from now on, and nothing that is queued ends.
    pub(crate) fn break_device(&mut self, device: i32, code: u32) {
        if let Some(broken) = self.broken.get_mut(device as usize) {
            *broken = Some(code);
        }
        let streams = self.lines.streams.values_mut();
        for line in streams.filter(|line| line.device == device) {
            line.failed.get_or_insert(code);
        }
    }

    pub(crate) fn free_bytes(&self, device: i32) -> u64 {
        let used = self
            .blocks
            .values()
            .filter(|b| b.kind == Kind::Device(device));
        DEVICE_BYTES - used.map(|block| block.len).sum::<u64>()
    }

    /// Takes a block away, which nothing queued may touch any more.
    pub(crate) fn free(&mut self, address: u64, fits: impl Fn(Kind) -> bool, call: &str) -> u32 {
        match self.blocks.get(&address) {
            Some(block) if fits(block.kind) => {
                let span = Span {
                    address,
                    len: block.len,
                };
                let touching = self.lines.touching(span);
                let Some(block) = self.blocks.remove(&address) else {
                    return INVALID_VALUE;
                };
                if touching > 0 {
                    self.note(format!(
                        "{call}: {touching} queued pieces of work touch {span:x?}"
                    ));
                    self.graveyard.push((address, block));
                }
                SUCCESS
            }
            _ => {
                self.note(format!("{call}: nothing of the kind at {address:#x}"));
                INVALID_VALUE
            }
        }
    }

    /// Whether the driver knows all of a range.
    pub(crate) fn is_known(&self, span: Span) -> bool {
        let below = self.blocks.range(..=span.address).next_back();
        below.is_some_and(|(address, block)| span.end() <= address + block.len)
    }

    /// Of which kind the memory is in which a range begins.
    fn kind_at(&self, span: Span) -> Option<Kind> {
        let (address, block) = self.blocks.range(..=span.address).next_back()?;
        (span.address < address + block.len).then_some(block.kind)
    }

    pub(crate) fn is_registered(&self, span: Span) -> bool {
        self.kind_at(span) == Some(Kind::Registered)
    }

    pub(crate) fn is_host(&self, span: Span) -> bool {
        matches!(self.kind_at(span), Some(Kind::Pinned | Kind::Registered))
    }

    /// Nobody retains a device's context any more: a driver would end what runs in it, half done.
    pub(crate) fn end_context(&mut self, device: i32) {
        let streams = self.lines.streams.values();
        let running = streams.filter(|line| line.device == device && line.failed.is_none());
        let queued: usize = running.map(|line| line.queue.len()).sum();
        if queued > 0 {
            self.note(format!(
                "the context of device {device} ends with {queued} pieces of work in it"
            ));
        }
    }

    /// Whether the driver knows some of a range.
    pub(crate) fn is_partly_known(&self, span: Span) -> bool {
        self.blocks.iter().any(|(address, block)| {
            let own = Span {
                address: *address,
                len: block.len,
            };
            own.overlaps(span)
        })
    }

    /// Where the bytes of a range are, if they are still there.
    fn pointer(&mut self, span: Span) -> Option<*mut u8> {
        let found = |address: u64, block: &mut Block| {
            let inside = address <= span.address && span.end() <= address + block.len;
            inside.then(|| match block.kind {
                Kind::Registered => std::ptr::with_exposed_provenance_mut(span.address as usize),
                _ => block
                    .pointer()
                    .wrapping_add((span.address - address) as usize),
            })
        };
        let live = self.blocks.range_mut(..=span.address).next_back();
        if let Some(pointer) = live.and_then(|(address, block)| found(*address, block)) {
            return Some(pointer);
        }
        let mut dead = self.graveyard.iter_mut();
        // The program may have unmapped what it registered.
        dead.find_map(|(address, block)| match block.kind {
            Kind::Registered => None,
            _ => found(*address, block),
        })
    }

    /// Queues work, or runs it where nothing waits.
    pub(crate) fn submit(&mut self, stream: u64, work: Work) -> u32 {
        if self.captures.status(stream) != 0 {
            return match work {
                Work::Wait { .. } => {
                    self.captures.spoil(stream);
                    CAPTURE_ISOLATION
                }
                // It goes into a graph that nobody launches.
                _ => SUCCESS,
            };
        }
        match self.lines.streams.get_mut(&stream) {
            Some(line) if !line.destroyed => {
                if let Some(code) = line.failed {
                    return code;
                }
                line.queue.push_back(work);
            }
            _ => {
                self.note(format!("no stream {stream:#x}"));
                return INVALID_HANDLE;
            }
        }
        if self.schedule == Schedule::Immediate {
            while self.advance_any() {}
        }
        SUCCESS
    }

    /// Runs the next piece of work of a stream. Says whether there was one that could run.
    pub(crate) fn advance(&mut self, stream: u64) -> bool {
        match self.lines.next(stream) {
            Some(work) => {
                self.run(&work);
                true
            }
            None => false,
        }
    }

    /// Runs one piece of work of a stream: a random one where the schedule is, else the oldest that can.
    pub(crate) fn advance_any(&mut self) -> bool {
        let mut busy = self.lines.busy();
        if let Schedule::Seeded(state) = &mut self.schedule
            && !busy.is_empty()
        {
            let at = draw(state) as usize % busy.len();
            busy.rotate_left(at);
        }
        busy.into_iter().any(|stream| self.advance(stream))
    }

    fn run(&mut self, work: &Work) {
        match *work {
            Work::Copy { target, source } => {
                let (Some(to), Some(from)) = (self.pointer(target), self.pointer(source)) else {
                    return self.note(format!("{work:x?} ran over memory that is gone"));
                };
                // SAFETY: `pointer` answers only for ranges inside blocks that are there: bytes of ours, or bytes
                // that the program has registered and not unregistered. No reference to them exists.
                unsafe { std::ptr::copy(from, to, target.len as usize) };
            }
            Work::Kernel { span, value } => match (self.pointer(span), value) {
                (None, _) => self.note(format!("{work:x?} ran over memory that is gone")),
                (Some(_), None) => {}
                (Some(to), Some(value)) => {
                    // SAFETY: as above.
                    unsafe { std::ptr::write_bytes(to, value, span.len as usize) }
                }
            },
            Work::Record { event, round } => self.lines.pass(event, round),
            Work::Wait { .. } => {}
        }
    }

    /// Copies between a block and the test: out of it, or into it.
    pub(crate) fn peek(&mut self, span: Span, buffer: *mut u8, into_block: bool) -> u32 {
        let span = self.resolve(span);
        let Some(bytes) = self.pointer(span) else {
            return INVALID_VALUE;
        };
        let (from, to) = match into_block {
            true => (buffer, bytes),
            false => (bytes, buffer),
        };
        // SAFETY: the range lies in a block, see `run`; the test's buffer has as many bytes.
        unsafe { std::ptr::copy(from, to, span.len as usize) };
        SUCCESS
    }
}

/// The next number of a sequence that its seed decides.
fn draw(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut word = *state;
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}
