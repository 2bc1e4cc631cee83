//! Pure: words of a buffer, as the HTTP/1.1 parser reads them, and numbers of which the verifier knows nothing.

use core::{
    mem::{self, MaybeUninit},
    ptr,
};

/// Returns eight bytes of `words` from byte `at` on, or the last eight if fewer follow, little-endian.
#[inline(always)]
pub(crate) fn word_at<const COUNT: usize>(words: &[u64; COUNT], at: usize) -> u64 {
    let last = (COUNT - 1) * 8;
    let at = if at > last { last } else { at };
    // SAFETY: eight bytes from there are inside `words`; any bytes are an integer.
    u64::from_le(unsafe { words.as_ptr().byte_add(at).read_unaligned() })
}

/// Stores the number of bytes in a window, in its last word.
#[inline(always)]
pub(crate) fn set_window_len<const WORDS: usize>(window: &mut [u64; WORDS], len: u32) {
    let word = &raw mut window[WORDS - 1];
    // SAFETY: half of a word of `window`. Volatile, so that the compiler does not keep the number in a register.
    unsafe { ptr::write_volatile(word.cast(), len) };
}

/// Returns the number of bytes in a window, which must be part of a map. The verifier then knows no bounds of the
/// number.
///
/// In a register or on the stack, a number keeps the bounds that each path has given it, and the verifier follows each
/// path to the end. Where the number is read from a map at each use, the paths merge.
#[inline(always)]
pub(crate) fn window_len<const WORDS: usize>(window: &[u64; WORDS]) -> u32 {
    let word = &raw const window[WORDS - 1];
    // SAFETY: half of a word of `window`.
    unsafe { ptr::read_volatile(word.cast()) }
}

/// Returns two numbers of which the verifier then knows nothing, without a map.
///
/// It tracks a number on the stack only where that is read in the size in which it was written.
#[inline(always)]
pub fn untracked_pair([first, second]: [u32; 2]) -> [u32; 2] {
    let mut word = MaybeUninit::<u64>::uninit();
    let halves = word.as_mut_ptr().cast::<u32>();
    // SAFETY: both halves of the word are written before it is read, and any bytes are numbers.
    unsafe {
        ptr::write_volatile(halves, first);
        ptr::write_volatile(halves.add(1), second);
        mem::transmute::<u64, [u32; 2]>(ptr::read_volatile(word.as_ptr()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_which_the_verifier_knows_nothing_stay_the_same() {
        let mut window = [u64::MAX; 3];
        for number in [0, 1, 768, u32::MAX] {
            set_window_len(&mut window, number);
            assert_eq!(window_len(&window), number);
            assert_eq!(window[..2], [u64::MAX; 2]);
            assert_eq!(untracked_pair([number, 7]), [number, 7]);
            assert_eq!(untracked_pair([7, number]), [7, number]);
        }
    }
}
