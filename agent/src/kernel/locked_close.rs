//! Shell: closes stale connections by the eBPF program `end`, which checks and closes each while it holds the socket's
//! lock.
//!
//! A client's write comes before that and spares the connection, or after it and fails without a byte sent. By
//! sock_diag, check and close are two calls, and a request that is written in between is lost. Needs Linux 6.5; on
//! older kernels, and if the kernel refuses the program, the agent works without it.

use std::{
    collections::BTreeSet,
    fs, io,
    os::fd::{AsFd as _, OwnedFd},
};

use aya::{
    Btf, BtfError, Ebpf,
    maps::{HashMap, MapData, MapError},
    programs::{Program, ProgramError},
};
use datapath::abi::{self, CloseRequest, SockFieldOffsets, maps};

use crate::{
    kernel::{
        btf::{self, KernelBtf},
        sys,
    },
    net::sockdiag::DiagConnection,
};

/// Name of the eBPF program that closes connections under their locks.
const END: &str = "end";
/// Kernel function that closes a locked socket.
const DESTROY: &str = "bpf_sock_destroy";

/// Reason for which connections are not closed under their locks.
#[derive(Debug, thiserror::Error)]
pub enum LockedCloseError {
    /// The kernel has no BTF, or in an unknown format.
    #[error("cannot read the kernel's types from {}", btf::FILE)]
    Types(#[source] io::Error),
    /// Aya cannot read the kernel's BTF.
    #[error("cannot read the kernel's types")]
    Btf(#[from] BtfError),
    /// The kernel is older than 6.5, or built without the function.
    #[error("the kernel has no function {DESTROY} (6.5)")]
    MissingFunction,
    /// The kernel's socket structures lack a field that the program reads.
    #[error("the kernel's sockets have no field {0}")]
    MissingField(&'static str),
    /// The object lacks the program or its map, or has not exactly one place for the call.
    #[error("the eBPF object has no program {END} with one call of {DESTROY}")]
    Object,
    /// The kernel refuses to load the program.
    #[error("the kernel refuses program {END}")]
    Program(#[from] ProgramError),
    /// The program's map cannot be used.
    #[error("cannot use map {}", maps::ENDING)]
    Map(#[from] MapError),
    /// The program cannot be linked as an iterator.
    #[error("cannot link program {END}")]
    Link(#[source] io::Error),
}

/// Support of the running kernel for this program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LockedCloseSupport {
    /// BTF id of the function.
    function_id: u32,
    /// Offsets of the fields of sockets.
    pub(crate) fields: SockFieldOffsets,
}

impl LockedCloseSupport {
    /// Detects the support of the running kernel.
    pub(crate) fn detect() -> Result<Self, LockedCloseError> {
        let bytes = fs::read(btf::FILE).map_err(LockedCloseError::Types)?;
        let unknown = || LockedCloseError::Types(io::ErrorKind::InvalidData.into());
        let types = KernelBtf::parse(&bytes).ok_or_else(unknown)?;
        let function_id = types.function_id(DESTROY).ok_or(LockedCloseError::MissingFunction)?;
        Ok(Self {
            function_id,
            fields: types.socket_fields().map_err(LockedCloseError::MissingField)?,
        })
    }

    /// Returns a copy of the object with the call of this kernel's function in its reserved place. Aya cannot link
    /// kernel functions yet.
    pub(crate) fn patch_object(&self, object: &[u8]) -> Result<AlignedObject, LockedCloseError> {
        let mut patched = AlignedObject::copy(object);
        let placeholder = encode_call(HELPER_CALL, abi::SOCK_DESTROY_PLACEHOLDER);
        // Instructions are aligned to their size, in memory and in the file.
        let mut call_sites =
            patched.bytes_mut().chunks_exact_mut(8).filter(|word| **word == placeholder);
        match (call_sites.next(), call_sites.next()) {
            (Some(call_site), None) => {
                call_site.copy_from_slice(&encode_call(KFUNC_CALL, self.function_id))
            }
            _ => return Err(LockedCloseError::Object),
        }
        Ok(patched)
    }
}

/// Source register of a call instruction: a helper's number follows.
const HELPER_CALL: u8 = 0;
/// Source register of a call instruction: the BTF id of a kernel function follows (`BPF_PSEUDO_KFUNC_CALL`).
const KFUNC_CALL: u8 = 2;

/// Encodes `struct bpf_insn` of a call: code, registers, offset, number.
fn encode_call(kind: u8, number: u32) -> [u8; 8] {
    const CALL: u8 = 0x85;
    // On a little-endian machine the source register is the high half.
    let registers = if cfg!(target_endian = "big") { kind } else { kind << 4 };
    let [a, b, c, d] = number.to_ne_bytes();
    [CALL, registers, 0, 0, a, b, c, d]
}

/// Copy of an object, aligned to 8 bytes as the loader needs it.
#[derive(Debug)]
pub(crate) struct AlignedObject {
    buffer: Vec<u8>,
    start: usize,
    length: usize,
}

impl AlignedObject {
    /// Copies an object.
    pub(crate) fn copy(object: &[u8]) -> Self {
        let length = object.len();
        let mut buffer = vec![0; length + 8];
        let start = buffer.as_ptr().align_offset(8) % 8;
        buffer[start..][..length].copy_from_slice(object);
        Self { buffer, start, length }
    }

    /// Returns the bytes of the object, to be changed in place.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[self.start..][..self.length]
    }

    /// Returns the bytes of the object.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..][..self.length]
    }
}

/// Closes connections under their locks.
#[derive(Debug)]
pub struct LockedCloser {
    link: OwnedFd,
    requests: HashMap<MapData, u64, CloseRequest>,
}

/// Numbers of connections by the outcome of their close.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CloseCounts {
    /// Connections that were closed.
    pub closed: u64,
    /// Connections that were left alone, because they were used meanwhile or are in use.
    pub spared: u64,
}

/// Position of a connection at which its pod has seen it idle. While it stands there, no request is under way on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdlePosition {
    /// Sequence number of the client's next byte.
    pub client_seq: u32,
    /// Sequence number of the pod's next byte.
    pub pod_seq: u32,
}

/// Outcome of a close at a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PositionOutcome {
    /// The connection stood there and was closed.
    Closed,
    /// Bytes before the position are still under way or unread. The connection may come to it yet.
    NotReached,
    /// The connection has been used since, or is closing.
    Passed,
    /// The attempt has failed, so nothing is known of the connection.
    Failed,
}

impl std::ops::AddAssign for CloseCounts {
    fn add_assign(&mut self, other: Self) {
        self.closed += other.closed;
        self.spared += other.spared;
    }
}

impl LockedCloser {
    /// Loads the program of a [patched](LockedCloseSupport::patch_object) object, and takes its map.
    pub(crate) fn load(ebpf: &mut Ebpf) -> Result<Self, LockedCloseError> {
        let btf = Btf::from_sys_fs()?;
        let Some(Program::Iter(program)) = ebpf.program_mut(END) else {
            return Err(LockedCloseError::Object);
        };
        program.load("tcp", &btf)?;
        let link = sys::link_iterator(program.fd()?.as_fd()).map_err(LockedCloseError::Link)?;
        let requests = ebpf.take_map(maps::ENDING).ok_or(LockedCloseError::Object)?;
        Ok(Self { link, requests: HashMap::try_from(requests)? })
    }

    /// Closes connections in the calling thread's network namespace. It spares a connection if a byte was written or
    /// received since it was listed, or if a message is under way or unanswered. `counts` grows by the outcomes, and
    /// `closed` by the cookies of the sockets that were closed, also if a later close fails.
    pub fn close(
        &mut self,
        connections: &[&DiagConnection],
        counts: &mut CloseCounts,
        closed: &mut BTreeSet<u64>,
    ) -> io::Result<()> {
        for batch in connections.chunks(abi::ENDING_MAX as usize) {
            let result = self.close_batch(batch);
            // Also after a failure: an entry that stays would be closed at the next walk.
            let outcomes = batch.iter().map(|connection| -> io::Result<CloseCounts> {
                let outcome = self.take_outcome(connection.cookie())?;
                if outcome.closed > 0 {
                    closed.insert(connection.cookie());
                }
                Ok(outcome)
            });
            let taken = add_outcomes(outcomes, counts);
            result.and(taken)?;
        }
        Ok(())
    }

    fn close_batch(&mut self, connections: &[&DiagConnection]) -> io::Result<()> {
        for connection in connections {
            let request = CloseRequest {
                bytes_acked: connection.activity.bytes_acked,
                bytes_received: connection.activity.bytes_received,
                result: abi::CLOSE_NOT_FOUND,
            };
            self.requests.insert(connection.cookie(), request, 0).map_err(io::Error::other)?;
        }
        sys::run_iterator(self.link.as_fd())
    }

    /// Closes connections in the calling thread's network namespace that stand at their positions. Sockets are named by
    /// their cookies. `outcomes` grows by the outcome of each socket that was reached, also if a later close fails.
    pub fn close_at_positions(
        &mut self,
        sockets: &[(u64, IdlePosition)],
        outcomes: &mut Vec<(u64, PositionOutcome)>,
    ) -> io::Result<()> {
        for batch in sockets.chunks(abi::ENDING_MAX as usize) {
            let mut result = self.walk_positions(batch);
            // Also after a failure: an entry that stays would be closed at the next walk.
            for &(cookie, _) in batch {
                match self.take_result(cookie) {
                    Ok(taken) => outcomes.extend(position_outcome(taken).map(|it| (cookie, it))),
                    Err(error) => result = result.and(Err(error)),
                }
            }
            result?;
        }
        Ok(())
    }

    fn walk_positions(&mut self, sockets: &[(u64, IdlePosition)]) -> io::Result<()> {
        for &(cookie, position) in sockets {
            let request = CloseRequest {
                bytes_acked: position.client_seq.into(),
                bytes_received: position.pod_seq.into(),
                result: abi::CLOSE_AT_POSITION,
            };
            self.requests.insert(cookie, request, 0).map_err(io::Error::other)?;
        }
        sys::run_iterator(self.link.as_fd())
    }

    /// Removes a connection's entry, and returns its outcome.
    fn take_outcome(&mut self, cookie: u64) -> io::Result<CloseCounts> {
        let taken = self.take_result(cookie)?;
        let count_if = |result| u64::from(taken == Some(result));
        Ok(CloseCounts { closed: count_if(abi::CLOSE_DONE), spared: count_if(abi::CLOSE_SKIPPED) })
    }

    /// Removes a connection's entry, and returns its result. `None`: there is no entry, as an insertion has failed.
    fn take_result(&mut self, cookie: u64) -> io::Result<Option<u64>> {
        let read = self.requests.get(&cookie, 0);
        if matches!(read, Err(MapError::KeyNotFound)) {
            return Ok(None);
        }
        // Also if the entry cannot be read: one that stays would be closed at the next walk.
        self.requests.remove(&cookie).map_err(io::Error::other)?;
        read.map(|request| Some(request.result)).map_err(io::Error::other)
    }
}

/// Returns the outcome that a result of the program stands for. `None`: the socket was not reached, as it has closed.
fn position_outcome(result: Option<u64>) -> Option<PositionOutcome> {
    match result? {
        abi::CLOSE_DONE => Some(PositionOutcome::Closed),
        abi::CLOSE_NOT_REACHED => Some(PositionOutcome::NotReached),
        abi::CLOSE_SKIPPED => Some(PositionOutcome::Passed),
        _ => None,
    }
}

/// Takes all outcomes, also those behind an error, and adds them to `counts`. Returns the first error.
fn add_outcomes(
    outcomes: impl Iterator<Item = io::Result<CloseCounts>>,
    counts: &mut CloseCounts,
) -> io::Result<()> {
    let mut result = Ok(());
    for outcome in outcomes {
        match outcome {
            Ok(outcome) => *counts += outcome,
            Err(error) => result = result.and(Err(error)),
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_before_and_behind_an_error_are_taken_and_counted() {
        let closed = CloseCounts { closed: 1, spared: 0 };
        let spared = CloseCounts { closed: 0, spared: 2 };
        let mut taken = 0;
        let failed = |cause: &str| Err(io::Error::other(cause));
        let outcomes = [Ok(closed), failed("first"), Ok(spared), failed("second"), Ok(spared)];
        let mut counts = CloseCounts::default();
        let result = add_outcomes(outcomes.into_iter().inspect(|_| taken += 1), &mut counts);
        assert_eq!(result.expect_err("two failed").to_string(), "first");
        assert_eq!((taken, counts), (5, CloseCounts { closed: 1, spared: 4 }));
        add_outcomes([Ok(closed), Ok(closed)].into_iter(), &mut counts).expect("none failed");
        assert_eq!(counts, CloseCounts { closed: 3, spared: 4 });
    }

    #[test]
    fn only_a_result_of_the_program_is_an_outcome() {
        let outcomes = [
            (None, None),
            (Some(abi::CLOSE_NOT_FOUND), None),
            (Some(abi::CLOSE_AT_POSITION), None),
            (Some(abi::CLOSE_DONE), Some(PositionOutcome::Closed)),
            (Some(abi::CLOSE_NOT_REACHED), Some(PositionOutcome::NotReached)),
            (Some(abi::CLOSE_SKIPPED), Some(PositionOutcome::Passed)),
        ];
        for (result, expected) in outcomes {
            assert_eq!(position_outcome(result), expected, "{result:?}");
        }
    }

    #[test]
    fn the_only_call_site_is_patched() {
        let support =
            LockedCloseSupport { function_id: 0x1234_5678, fields: SockFieldOffsets::default() };
        let placeholder = encode_call(HELPER_CALL, abi::SOCK_DESTROY_PLACEHOLDER);
        let object = [[1; 8], placeholder, [2; 8]].concat();
        let patched = support.patch_object(&object).expect("one call site");
        let call = encode_call(KFUNC_CALL, 0x1234_5678);
        assert_eq!(patched.bytes(), [[1; 8], call, [2; 8]].concat());
        assert_eq!(patched.bytes().as_ptr().align_offset(8), 0);
        for object in
            [vec![1; 16], [placeholder, placeholder].concat(), [&[0; 4], &placeholder[..]].concat()]
        {
            assert!(matches!(support.patch_object(&object), Err(LockedCloseError::Object)));
        }
    }
}
