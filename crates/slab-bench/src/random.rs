//! Reproducible random numbers, and the sizes that are asked for.

/// Xorshift with 64 bits of state.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream that starts at `seed`, which is not zero.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The stream number `index` of a family.
    #[must_use]
    pub fn stream(family: u64, index: u64) -> Self {
        let mut random = Self(family ^ (index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        // Seeds that differ in few bits start with similar numbers.
        for _ in 0..8 {
            random.next();
        }
        random
    }

    #[inline]
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `bound`, which is less than 2^32.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        ((self.next() >> 32) * bound) >> 32
    }
}

/// A distribution of sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// Embeddings of 64 to 4,096 tokens, evenly, in the hidden sizes of five models, two bytes a number.
    Encoder,
    /// The same with small images prevailing: evenly over the powers of two.
    EncoderLog,
    /// 1 to 4,096 bytes, evenly.
    Small,
    /// Always 4,096 bytes.
    Equal,
}

const HIDDEN: [u64; 5] = [1152, 3584, 4096, 5120, 8192];

impl Sizes {
    /// One size.
    #[inline]
    pub fn draw(self, random: &mut Random) -> u64 {
        let tokens = match self {
            Self::Encoder => 64 + random.below(4096 - 64 + 1),
            Self::EncoderLog => {
                let least = (64 << random.below(7)).min(4096);
                (least + random.below(least)).min(4096)
            }
            Self::Small => return 1 + random.below(4096),
            Self::Equal => return 4096,
        };
        tokens * HIDDEN[random.below(5) as usize] * 2
    }

    /// About how many regions of this kind are live in a slab of `capacity` bytes, at most.
    #[must_use]
    pub const fn live_max(self, capacity: u64) -> usize {
        match self {
            Self::Encoder => 512,
            Self::EncoderLog => 1024,
            Self::Small | Self::Equal => (capacity / 2048) as usize,
        }
    }
}
