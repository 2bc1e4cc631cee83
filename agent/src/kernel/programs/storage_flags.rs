//! Pure: flags of the map `CONNS` in the object, as the running kernel needs them.
//!
//! Aya takes a map's flags from the object and has no way to override them. In BTF they are the length of an array.

/// Flag that each socket storage has (`BPF_F_NO_PREALLOC`).
const NO_PREALLOC: u32 = 1;
/// Flag of a socket storage by which an accepted socket begins with its listener's value (`BPF_F_CLONE`).
const CLONE: u32 = 1 << 9;

/// Kind of an array in BTF (`BTF_KIND_ARRAY`), in the second word of a type.
const ARRAY: u32 = 3 << 24;
/// Length of an array type in BTF: no name, kind, no size; types of elements and of the index, number of elements.
const ARRAY_BYTES: usize = 24;
/// Offset of the number of elements in it.
const LENGTH_OFFSET: usize = 20;

/// Clears the flag by which accepted sockets begin with their listener's values, which costs each of them 1 µs and the
/// size of a value.
///
/// Returns false without a change if the object has not exactly one description of such flags.
pub(super) fn clear_clone_flag(object: &mut [u8]) -> bool {
    let [name, kind, size] = [0, ARRAY, 0].map(u32::to_ne_bytes);
    let head = [name, kind, size].concat();
    let flags = (NO_PREALLOC | CLONE).to_ne_bytes();
    // Types are aligned to four bytes, in memory and in the file.
    let types = object.windows(ARRAY_BYTES).step_by(4).enumerate();
    let mut wanted = types.filter(|(_, it)| it[LENGTH_OFFSET..] == flags && it.starts_with(&head));
    let (Some((index, _)), None) = (wanted.next(), wanted.next()) else { return false };
    let at = index * 4 + LENGTH_OFFSET;
    object[at..][..flags.len()].copy_from_slice(&NO_PREALLOC.to_ne_bytes());
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of an array type in BTF with this number of elements.
    fn array_type(length: u32) -> Vec<u8> {
        [0, ARRAY, 0, 2, 4, length].iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn the_only_description_of_cloned_storage_loses_the_flag() {
        let cloned = array_type(NO_PREALLOC | CLONE);
        let others = [array_type(NO_PREALLOC), array_type(CLONE), vec![7; 8]].concat();
        let mut object = [&others[..], &cloned, &others].concat();
        assert!(clear_clone_flag(&mut object));
        assert_eq!(object, [&others[..], &array_type(NO_PREALLOC), &others].concat());
        assert!(!clear_clone_flag(&mut object), "none is left");
    }

    #[test]
    fn an_object_with_none_or_two_descriptions_stays_as_it_is() {
        let cloned = array_type(NO_PREALLOC | CLONE);
        let unaligned = [&[0_u8; 2][..], &cloned].concat();
        let cut_off = cloned[..ARRAY_BYTES - 1].to_vec();
        for object in [Vec::new(), unaligned, cut_off, [&cloned[..], &cloned].concat()] {
            let mut changed = object.clone();
            assert!(!clear_clone_flag(&mut changed));
            assert_eq!(changed, object);
        }
    }
}
