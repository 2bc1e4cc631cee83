//! Pure: shortens a stream that fails to the shortest one found that still fails.

/// Removes pieces of `bytes` as long as `fails` stays true, and returns the shortest stream found.
///
/// Calls `fails` a few thousand times at most.
pub fn shrink_failing(bytes: &[u8], mut fails: impl FnMut(&[u8]) -> bool) -> Vec<u8> {
    let mut best = bytes.to_vec();
    let mut left = 6_000;
    let mut piece_len = best.len().next_power_of_two();
    while piece_len > 0 && left > 0 {
        let (old_len, mut at) = (best.len(), 0);
        while at < best.len() && left > 0 {
            let mut shorter = best.clone();
            shorter.drain(at..(at + piece_len).min(best.len()));
            left -= 1;
            if fails(&shorter) {
                best = shorter;
            } else {
                at += piece_len;
            }
        }
        // Removed bytes may have been the reason why other pieces had to stay.
        if piece_len > 1 || best.len() == old_len {
            piece_len /= 2;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_matter_is_left_out() {
        let fails = |bytes: &[u8]| bytes.contains(&b'x') && bytes.ends_with(b"yz");
        assert_eq!(shrink_failing(b"aaaxaaaaaaaaaaybbbbbbyz", fails), b"xyz");
    }
}
