//! Pure: unaligned words of a buffer, as the HTTP/1.1 parser reads them.

/// Returns eight bytes of `words` from byte `at` on, or the last eight if fewer follow, little-endian.
#[inline(always)]
pub(crate) fn word_at<const COUNT: usize>(words: &[u64; COUNT], at: usize) -> u64 {
    let last = (COUNT - 1) * 8;
    let at = if at > last { last } else { at };
    // SAFETY: eight bytes from there are inside `words`; any bytes are an integer.
    u64::from_le(unsafe { words.as_ptr().byte_add(at).read_unaligned() })
}
