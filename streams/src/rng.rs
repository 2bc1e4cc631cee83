//! Pure: random numbers from a seed, the same on every machine.

/// Generator of random numbers; the same seed gives the same numbers.
#[derive(Clone, Debug)]
pub struct SeededRng {
    seed: u64,
    /// Bytes that are drawn in place of random numbers, in reverse order; zeros follow them. `None`: the seed is used.
    script: Option<Vec<u8>>,
}

impl SeededRng {
    /// A generator that begins with `seed`.
    pub fn new(seed: u64) -> Self {
        Self { seed, script: None }
    }

    /// A generator whose seed is a hash (FNV-1a) of `bytes`.
    pub fn from_hash_of(bytes: &[u8]) -> Self {
        let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        Self::new(bytes.iter().fold(0xcbf2_9ce4_8422_2325, mix))
    }

    /// A generator that draws the bytes of a script, and zeros after its end. So a changed byte changes one decision.
    pub fn from_script(bytes: &[u8]) -> Self {
        Self { seed: 0, script: Some(bytes.iter().rev().copied().collect()) }
    }

    /// Returns true if a script has been drawn to its end.
    pub fn is_exhausted(&self) -> bool {
        self.script.as_ref().is_some_and(Vec::is_empty)
    }

    /// Draws any 64-bit number, by SplitMix64.
    pub fn next_u64(&mut self) -> u64 {
        if let Some(script) = &mut self.script {
            return u64::from(script.pop().unwrap_or(0)) * 0x0101_0101_0101_0101;
        }
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.seed ^ self.seed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// Draws a number below `bound`, which must not be 0.
    pub fn next_below(&mut self, bound: usize) -> usize {
        ((self.next_u64() >> 32) as usize) % bound
    }

    /// Draws true with a probability of `percent`.
    pub fn next_bool(&mut self, percent: usize) -> bool {
        self.next_below(100) < percent
    }

    /// Draws an element of a list, which must not be empty.
    pub fn pick<'a, T: ?Sized>(&mut self, list: &[&'a T]) -> &'a T {
        list[self.next_below(list.len())]
    }

    /// Draws a length: mostly small, sometimes up to `max_count`.
    pub fn next_length(&mut self, max_count: usize) -> usize {
        let bound = match self.next_below(8) {
            0..3 => 4,
            3..6 => 40,
            6 => 400,
            _ => max_count,
        };
        self.next_below(bound.min(max_count) + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_numbers() {
        let drawn = |seed| {
            let mut rng = SeededRng::new(seed);
            [(); 4].map(|()| rng.next_below(1_000_000))
        };
        assert_eq!(drawn(7), drawn(7));
        assert_ne!(drawn(7), drawn(8));
        assert_ne!(
            SeededRng::from_hash_of(b"ab").next_u64(),
            SeededRng::from_hash_of(b"ba").next_u64()
        );
    }
}
