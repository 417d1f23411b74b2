//! What a proxy does to one connection.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Random;

/// What happens to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// Both ends see the end of the stream.
    Truncate,
    /// Both ends see a reset.
    Reset,
    /// One direction ends, the other goes on.
    HalfClose,
    /// Nothing more passes, either way, and nobody is told.
    Stall,
    /// Nothing more passes in one direction.
    StallOneWay,
    /// Nothing passes for a moment.
    Pause,
    /// One bit is another. No transport can notice that: only for the test that the comparison does.
    Flip,
}

/// A direction of a connection, seen from whoever opened it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    There,
    Back,
}

/// What is done to one connection, and where.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// After how many bytes of which direction something happens.
    pub(crate) fault: Option<(Way, u64, Fault)>,
    /// Longest piece that is passed on at once, of the first bytes and of those after them.
    pub(crate) pieces_max: [usize; 2],
}

/// Bytes of a connection that may be passed on one by one: more would only take time.
pub(crate) const FIRST_BYTES: u64 = 600;

impl Plan {
    /// Passes everything on as it comes.
    pub(crate) const CLEAN: Self = Self {
        fault: None,
        pieces_max: [64 << 10; 2],
    };

    pub(crate) fn draw(random: &mut Random, profile: &Profile) -> Self {
        let fault = random.chance(profile.percent).then(|| {
            let way = random.pick(&[Way::There, Way::Back]);
            let at = match random.below(3) {
                // Inside and around a header and a status frame.
                0 => random.below(34),
                _ => random.of_any_size(profile.bytes_bits),
            };
            (way, at, random.pick(profile.faults))
        });
        let pieces_max = [
            random.pick(&[1, 1, 3, 7, 64 << 10]),
            random.pick(&[1_000, 4_097, 64 << 10]),
        ];
        Self { fault, pieces_max }
    }
}

/// Which faults there are and how often.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Profile {
    /// Connections with a fault, of a hundred.
    pub(crate) percent: u64,
    /// A fault comes after less than `2^bytes_bits` bytes.
    pub(crate) bytes_bits: u64,
    pub(crate) faults: &'static [Fault],
    /// How long a pause lasts.
    pub(crate) pause: Duration,
}

impl Profile {
    /// Whatever a network does.
    pub(crate) const NETWORK: Self = Self {
        percent: 70,
        bytes_bits: 19,
        faults: &[
            Fault::Truncate,
            Fault::Truncate,
            Fault::Reset,
            Fault::Reset,
            Fault::HalfClose,
            Fault::Stall,
            Fault::StallOneWay,
            Fault::Pause,
        ],
        pause: Duration::from_millis(30),
    };
}

/// How often which fault happened.
pub(crate) type Happened = BTreeMap<Fault, u64>;
