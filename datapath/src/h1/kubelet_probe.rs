//! Pure: recognition of the kubelet's probes by their User-Agent.
//!
//! The kubelet's prober sends `kube-probe/1.36` (kubernetes/kubernetes `pkg/probe/http/request.go`), and Go's client
//! writes that line directly behind `Host`.

use core::hint::black_box;

use super::scan::le_word;

/// First bytes of the prober's User-Agent line, with the end of the line before it.
const USER_AGENT_LINE: [u64; 3] =
    [le_word(b"\r\nUser-A"), le_word(b"gent: ku"), le_word(b"be-probe")];

/// Bytes of a head that are searched. The line is behind the path and `Host`.
pub const SEARCHED_BYTES: u32 = 672;

/// Returns true if the first `len` bytes of a head contain the line. `eight` returns eight of them, little-endian, from
/// any offset up to `SEARCHED_BYTES` + 16.
///
/// It has no branches: each would be one more path for the verifier.
#[inline(always)]
pub fn is_kubelet_probe(len: u32, eight: impl Fn(usize) -> u64) -> bool {
    let (mut matched, mut at) = (0, 0);
    let len = black_box(u64::from(len));
    while at < SEARCHED_BYTES as usize {
        // The compiler recognises comparisons in these words and bits, and would turn them into branches.
        let differs = (eight(at) ^ USER_AGENT_LINE[0])
            | (eight(at + 8) ^ USER_AGENT_LINE[1])
            | (eight(at + 16) ^ USER_AGENT_LINE[2]);
        let differs = black_box(differs);
        let differs = black_box((differs | black_box(differs.wrapping_neg())) >> 63);
        // Bytes behind the head may be left from an older one.
        let is_inside = black_box((at as u64 + 23).wrapping_sub(len) >> 63);
        matched |= (differs ^ 1) & is_inside;
        at += 1;
    }
    matched != 0
}

#[cfg(test)]
mod tests {
    use std::{string::String, vec::Vec};

    use super::*;

    /// Searches `head` as the eBPF programs store it: its begin, in front of remains of `left`.
    fn is_found(head: &str, left: &str) -> bool {
        let mut bytes: Vec<u8> = left.bytes().cycle().take(SEARCHED_BYTES as usize + 24).collect();
        let len = head.len().min(SEARCHED_BYTES as usize);
        bytes[..len].copy_from_slice(&head.as_bytes()[..len]);
        is_kubelet_probe(len as u32, |at| {
            let mut eight = [0; 8];
            eight.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(eight)
        })
    }

    fn head(padding: usize, agent: &str) -> String {
        let path = "x".repeat(padding);
        std::format!(
            "GET /{path} HTTP/1.1\r\nHost: 10.0.0.1:8080\r\nUser-Agent: {agent}\r\nAccept: */*\r\n\r\n"
        )
    }

    #[test]
    fn the_kubelets_name_is_found_wherever_it_stands() {
        for padding in 0..600 {
            assert!(is_found(&head(padding, "kube-probe/1.36"), "\0"), "{padding}");
            assert!(!is_found(&head(padding, "curl/8.14"), "\0"), "{padding}");
            assert!(!is_found(&head(padding, "kube-prob"), "\0"), "{padding}");
        }
    }

    #[test]
    fn what_an_older_head_left_behind_does_not_count() {
        let left = head(0, "kube-probe/1.36");
        for padding in 0..100 {
            assert!(!is_found(&head(padding, "curl/8.14"), &left), "{padding}");
        }
        let cut = &left[..left.find("be-probe").expect("it is there") + 7];
        assert!(!is_found(cut, &left[cut.len()..]));
    }

    #[test]
    fn the_name_counts_only_as_the_agents_own() {
        for head in [
            "GET / HTTP/1.1\r\nHost: a\r\nX-User-Agent: kube-probe/1\r\n\r\n",
            "GET /?User-Agent:%20kube-probe/1 HTTP/1.1\r\nHost: a\r\n\r\n",
        ] {
            assert!(!is_found(head, "\0"), "{head}");
        }
    }
}
