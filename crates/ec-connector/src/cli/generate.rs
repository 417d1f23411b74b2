//! Made-up encoder outputs: realistic shapes, bytes that follow from a seed.
//!
//! Two processes that know the seed know the bytes, so the receiving one can compare all of them without being
//! sent anything but the seed.

/// Hidden sizes of well-known vision encoders and the projections behind them.
const HIDDEN: [u64; 7] = [1152, 1280, 1536, 2048, 3584, 4096, 5120];
const TOKENS_MIN: u64 = 256;
const TOKENS_MAX: u64 = 4096;
const BF16_BYTES: u64 = 2;

/// One encoder output in bfloat16: `[tokens, hidden]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct EncoderOutput {
    pub(crate) tokens: u64,
    pub(crate) hidden: u64,
    pub(crate) seed: u64,
}

impl EncoderOutput {
    /// The output number `index` of the run with `seed`.
    fn new(seed: u64, index: u64) -> Self {
        let mut draws = (0..).map(|n| mix(mix(seed ^ mix(index)).wrapping_add(n)));
        let mut draw = || draws.next().unwrap_or_default();
        Self {
            hidden: HIDDEN[(draw() % HIDDEN.len() as u64) as usize],
            tokens: TOKENS_MIN + draw() % (TOKENS_MAX - TOKENS_MIN + 1),
            seed: draw(),
        }
    }

    pub(crate) fn shape(&self) -> [u64; 2] {
        [self.tokens, self.hidden]
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.tokens * self.hidden * BF16_BYTES
    }

    /// Writes the bytes from `offset` on into `target`. `offset` and the length are multiples of eight.
    pub(crate) fn fill(&self, offset: u64, target: &mut [u8]) {
        // Any sign, exponents of 0.5 to 2 and seven bits of fraction: finite values of ordinary size.
        const KEEP: u64 = 0x80ff_80ff_80ff_80ff;
        const SET: u64 = 0x3f00_3f00_3f00_3f00;
        let (words, rest) = target.as_chunks_mut::<8>();
        debug_assert!(offset.is_multiple_of(8) && rest.is_empty());
        for (counter, word) in (offset / 8..).zip(words) {
            let bits = mix(self.seed.wrapping_add(counter));
            *word = (bits & KEEP | SET).to_le_bytes();
        }
    }
}

/// One push of a run: an output, and whether an earlier push already carried it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlannedItem {
    pub(crate) output: EncoderOutput,
    pub(crate) repeated: bool,
}

/// Plans `items` pushes of which a quarter repeat an output of the last `reach` bytes before them.
pub(crate) fn plan(items: usize, seed: u64, reach: u64) -> Vec<PlannedItem> {
    let mut planned: Vec<PlannedItem> = Vec::with_capacity(items);
    let mut fresh = 0;
    for index in 0..items {
        let repeat = (index % 4 == 3)
            .then(|| recent(&planned, reach))
            .filter(|recent| !recent.is_empty())
            .map(|recent| recent[(mix(seed ^ index as u64) % recent.len() as u64) as usize].output);
        planned.push(match repeat {
            Some(output) => PlannedItem {
                output,
                repeated: true,
            },
            None => {
                fresh += 1;
                PlannedItem {
                    output: EncoderOutput::new(seed, fresh),
                    repeated: false,
                }
            }
        });
    }
    planned
}

/// The longest end of `planned` whose outputs have at most `reach` bytes together.
fn recent(planned: &[PlannedItem], reach: u64) -> &[PlannedItem] {
    let mut bytes = 0;
    let count = planned
        .iter()
        .rev()
        .take_while(|item| {
            bytes += item.output.len_bytes();
            bytes <= reach
        })
        .count();
    &planned[planned.len() - count..]
}

/// A bijection on 64 bits whose outputs look random: the finaliser of splitmix64 (Steele, Lea, Flood 2014).
fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_stay_in_the_range_of_real_encoders_and_follow_the_seed() {
        let run = plan(200, 7, u64::MAX);
        for item in &run {
            assert!((256..=4096).contains(&item.output.tokens));
            assert!((1152..=5120).contains(&item.output.hidden));
            assert_eq!(
                item.output.len_bytes(),
                item.output.tokens * item.output.hidden * 2
            );
        }
        assert_eq!(run, plan(200, 7, u64::MAX));
        assert_ne!(run, plan(200, 8, u64::MAX));
    }

    #[test]
    fn a_quarter_repeats_outputs_within_reach() {
        let reach = 100 << 20;
        let run = plan(64, 1, reach);
        assert_eq!(run.iter().filter(|item| item.repeated).count(), 16);
        for (index, item) in run.iter().enumerate().filter(|(_, item)| item.repeated) {
            assert!(
                recent(&run[..index], reach)
                    .iter()
                    .any(|r| r.output == item.output)
            );
        }
        let fresh: std::collections::HashSet<_> = run
            .iter()
            .filter(|item| !item.repeated)
            .map(|item| item.output.seed)
            .collect();
        assert_eq!(fresh.len(), 48, "outputs that are no repeats differ");
    }

    #[test]
    fn without_reach_nothing_repeats() {
        assert!(plan(64, 1, 1000).iter().all(|item| !item.repeated));
        assert!(plan(0, 1, 1000).is_empty());
    }

    #[test]
    fn bytes_do_not_depend_on_how_they_are_asked_for_and_are_finite_numbers() {
        let output = EncoderOutput {
            tokens: 4,
            hidden: 16,
            seed: 3,
        };
        let mut whole = vec![0; output.len_bytes() as usize];
        output.fill(0, &mut whole);
        let mut pieces = vec![0; whole.len()];
        for (index, piece) in pieces.chunks_mut(24).enumerate() {
            output.fill(24 * index as u64, piece);
        }
        assert_eq!(whole, pieces);
        for &[low, high] in whole.as_chunks::<2>().0 {
            let value = f32::from_bits(u32::from(u16::from_le_bytes([low, high])) << 16);
            assert!((0.5..2.0).contains(&value.abs()), "{value}");
        }
    }
}
