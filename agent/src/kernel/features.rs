//! Shell: features of this kernel's verifier, detected by loading programs of a few instructions.
//!
//! The kernel's version does not show them: distributions backport helpers to older kernels, and leave some out of
//! newer ones.

use datapath::abi::{SocketBit, TaskFlag};

use crate::kernel::{
    btf::{self, KernelBtf},
    sys,
};

/// Type of the programs on packets of a cgroup's sockets (`enum bpf_prog_type`).
const PROG_CGROUP_SKB: u32 = 8;
/// Type of the sock_ops programs (`enum bpf_prog_type`).
const PROG_SOCK_OPS: u32 = 13;
/// Type of the programs on addresses of sockets (`enum bpf_prog_type`).
const PROG_SOCK_ADDR: u32 = 18;
/// Type and attach type of the sock_ops programs: the kernel reads no attach type of theirs.
const SOCK_OPS: [u32; 2] = [PROG_SOCK_OPS, 0];
/// Attach type of packets to a socket (`enum bpf_attach_type`).
const ATTACH_INGRESS: u32 = 0;
/// Attach type of IPv4 connects (`enum bpf_attach_type`).
const ATTACH_CONNECT4: u32 = 10;

/// Number of a helper (`include/uapi/linux/bpf.h`); numbers never change. This one returns the calling task.
const GET_CURRENT_TASK: i32 = 35;
/// Helper that reads any kernel memory.
const PROBE_READ_KERNEL: i32 = 113;
/// Helper that returns the cookie of a network namespace.
const GET_NETNS_COOKIE: i32 = 122;
/// Helper that sets the errno of a refused system call.
const SET_RETVAL: i32 = 187;
/// Helper that returns the Multipath TCP socket of a subflow.
const SKC_TO_MPTCP_SOCK: i32 = 196;

/// Register that holds the end of the stack.
const FRAME_POINTER: u8 = 10;

/// Offset of `sk` in `struct bpf_sock_addr`.
const SK_OFFSET: i16 = 64;

/// Load of a program that is dropped at once: its type, its attach type, its instructions. Returns true if the kernel
/// accepts it.
type TrialLoad = dyn Fn(u32, u32, &[u64]) -> bool;

/// Features of the verifier for which the eBPF programs have fallbacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "each is a feature by itself")]
pub struct VerifierFeatures {
    /// If true, programs choose the errno of a call that they deny: ECONNREFUSED (usually 5.18). Without it, denied calls
    /// fail with EPERM, and [connects of TCP](Self::refuses_tcp_with_econnrefused) are led to a closed port instead.
    pub set_retval: bool,
    /// If true, sock_ops programs may call `bpf_get_netns_cookie` (usually 5.15). A listener whose bind was not seen is
    /// counted then, and connections that do not count have no storage.
    pub sock_ops_netns_cookie: bool,
    /// If true, packet programs may call `bpf_get_netns_cookie` (usually 6.15). They then never buffer a segment for a
    /// pod of others.
    pub packet_netns_cookie: bool,
    /// If true, a subflow of Multipath TCP is recognized (usually 5.19, if that is built in).
    pub mptcp_sock: bool,
    /// Bit by which an IPv6-only wildcard listener is recognized. No bit if the kernel has no BTF, or if sock_ops
    /// programs may not read kernel memory. Then such a listener counts as one of both families.
    pub v6_only: SocketBit,
    /// Flag by which kernel threads are recognized. No flag if the kernel has no BTF, or if programs at connects may
    /// not read kernel memory. Then kernel threads are taken for other tasks, and without `set_retval` a refused connect
    /// fails with EPERM.
    pub kernel_thread: TaskFlag,
}

impl VerifierFeatures {
    /// None of the features, as on the oldest kernel.
    pub const NONE: Self = Self {
        set_retval: false,
        sock_ops_netns_cookie: false,
        packet_netns_cookie: false,
        mptcp_sock: false,
        v6_only: SocketBit { byte_index: 0, mask: 0 },
        kernel_thread: TaskFlag { mask: 0, offset: 0, reserved: 0 },
    };

    /// Returns true if a refused connect of TCP fails with ECONNREFUSED, else with EPERM (`ebpf/src/refusal.rs`).
    pub const fn refuses_tcp_with_econnrefused(&self) -> bool {
        // A kernel thread must not be led to the closed port, so it must be recognized.
        self.set_retval || self.kernel_thread.mask != 0
    }

    /// Detects the features of the running kernel.
    pub fn detect() -> Self {
        Self::detect_by(&sys::accepts_program)
    }

    /// Detects the features of a kernel by trial loads.
    fn detect_by(accepts: &TrialLoad) -> Self {
        let first_argument = BpfInstruction::mov_imm(1, -1);
        let socket = BpfInstruction::load_u64(1, 1, SK_OFFSET);
        // Arguments of a read of eight bytes from address 0 to the stack.
        let probe_read = [
            BpfInstruction::mov_reg(1, FRAME_POINTER),
            BpfInstruction::add_imm(1, -8),
            BpfInstruction::mov_imm(2, 8),
            BpfInstruction::mov_imm(3, 0),
        ];
        // Each call has valid arguments, so that only a missing helper is a reason to refuse it.
        let at_connect = |before: &[BpfInstruction], helper| {
            accepts_helper(accepts, [PROG_SOCK_ADDR, ATTACH_CONNECT4], before, helper)
        };
        let at_packets =
            |helper| accepts_helper(accepts, [PROG_CGROUP_SKB, ATTACH_INGRESS], &[], helper);
        let at_sock_ops =
            |before: &[BpfInstruction], helper| accepts_helper(accepts, SOCK_OPS, before, helper);
        let reads_tasks =
            at_connect(&[], GET_CURRENT_TASK) && at_connect(&probe_read, PROBE_READ_KERNEL);
        Self {
            set_retval: at_connect(&[first_argument], SET_RETVAL),
            sock_ops_netns_cookie: at_sock_ops(&[], GET_NETNS_COOKIE),
            packet_netns_cookie: at_packets(GET_NETNS_COOKIE),
            mptcp_sock: at_connect(&[socket], SKC_TO_MPTCP_SOCK),
            v6_only: at_sock_ops(&probe_read, PROBE_READ_KERNEL)
                .then(find_v6_only_bit)
                .flatten()
                .unwrap_or_default(),
            kernel_thread: reads_tasks.then(find_kernel_thread_flag).flatten().unwrap_or_default(),
        }
    }
}

/// Returns true if sock_ops programs may call `bpf_get_netns_cookie`. Without it, connections to a listener that is older
/// than the programs are neither counted nor reported.
pub fn accepts_sock_ops_netns_cookie() -> bool {
    accepts_helper(&sys::accepts_program, SOCK_OPS, &[], GET_NETNS_COOKIE)
}

/// Returns the flag of kernel threads, from the kernel's BTF.
fn find_kernel_thread_flag() -> Option<TaskFlag> {
    KernelBtf::parse(&std::fs::read(btf::FILE).ok()?)?.kernel_thread_flag()
}

/// Returns true if the kernel accepts programs of the types that the agent attaches to cgroups, from this process.
pub fn accepts_cgroup_programs() -> bool {
    let pass: Vec<u64> =
        [BpfInstruction::mov_imm(0, 1), BpfInstruction::EXIT].iter().map(|it| it.0).collect();
    sys::accepts_program(PROG_SOCK_ADDR, ATTACH_CONNECT4, &pass)
        && sys::accepts_program(PROG_SOCK_OPS, 0, &pass)
}

/// Returns the bit of a socket's IPV6_V6ONLY, from the kernel's BTF.
fn find_v6_only_bit() -> Option<SocketBit> {
    KernelBtf::parse(&std::fs::read(btf::FILE).ok()?)?.v6_only()
}

/// Returns true if the verifier accepts a program that calls this helper with the context, or with the arguments that
/// `before` sets. The program's type and its attach type are given first.
fn accepts_helper(
    accepts: &TrialLoad,
    [program, attach]: [u32; 2],
    before: &[BpfInstruction],
    helper: i32,
) -> bool {
    let call =
        [BpfInstruction::call_helper(helper), BpfInstruction::mov_imm(0, 1), BpfInstruction::EXIT];
    let code: Vec<u64> = before.iter().copied().chain(call).map(|it| it.0).collect();
    accepts(program, attach, &code)
}

/// One instruction as the kernel reads it: code, registers, offset, number.
#[derive(Clone, Copy)]
struct BpfInstruction(u64);

impl BpfInstruction {
    const EXIT: Self = Self::new(0x95, 0, 0, 0);

    const fn new(code: u8, registers: u8, offset: i16, number: i32) -> Self {
        let (offset, number) = (offset as u16, number as u32);
        Self(code as u64 | (registers as u64) << 8 | (offset as u64) << 16 | (number as u64) << 32)
    }

    /// Encodes the instruction `register = number`.
    const fn mov_imm(register: u8, number: i32) -> Self {
        Self::new(0xB7, register, 0, number)
    }

    /// Encodes the instruction `to = from`.
    const fn mov_reg(to: u8, from: u8) -> Self {
        Self::new(0xBF, to | from << 4, 0, 0)
    }

    /// Encodes the instruction `register += number`.
    const fn add_imm(register: u8, number: i32) -> Self {
        Self::new(0x07, register, 0, number)
    }

    /// Encodes the instruction `to = *(u64 *)(from + offset)`.
    const fn load_u64(to: u8, from: u8, offset: i16) -> Self {
        Self::new(0x79, to | from << 4, offset, 0)
    }

    const fn call_helper(helper: i32) -> Self {
        Self::new(0x85, 0, 0, helper)
    }
}

#[cfg(test)]
mod tests {
    use datapath::abi::KERNEL_THREAD_FLAG;

    use super::*;

    #[test]
    fn instructions_are_encoded_as_the_kernel_reads_them() {
        let bytes = |it: BpfInstruction| it.0.to_le_bytes();
        assert_eq!(bytes(BpfInstruction::mov_imm(1, -1)), [0xB7, 1, 0, 0, 255, 255, 255, 255]);
        assert_eq!(
            bytes(BpfInstruction::mov_reg(1, FRAME_POINTER)),
            [0xBF, 0xA1, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(bytes(BpfInstruction::add_imm(1, -8)), [0x07, 1, 0, 0, 0xF8, 255, 255, 255]);
        assert_eq!(
            bytes(BpfInstruction::load_u64(1, 1, SK_OFFSET)),
            [0x79, 0x11, 64, 0, 0, 0, 0, 0]
        );
        assert_eq!(bytes(BpfInstruction::call_helper(187)), [0x85, 0, 0, 0, 187, 0, 0, 0]);
    }

    /// Returns the helper that a program of a trial calls.
    fn called_helper(code: &[u64]) -> i32 {
        let is_call = |it: &&u64| it.to_le_bytes()[0] == 0x85;
        let call = code.iter().find(is_call).expect("each trial calls a helper");
        (*call >> 32) as i32
    }

    /// Detects the features of a kernel that refuses programs of one type that call one helper.
    fn detect_without(program: u32, helper: i32) -> VerifierFeatures {
        VerifierFeatures::detect_by(&move |kind, _attach, code| {
            (kind, called_helper(code)) != (program, helper)
        })
    }

    /// The running kernel's version is the same in all cases.
    #[test]
    fn a_feature_is_missing_where_the_kernel_refuses_the_call_of_its_helper_and_only_there() {
        let flags = |it: VerifierFeatures| {
            [it.set_retval, it.sock_ops_netns_cookie, it.packet_netns_cookie, it.mptcp_sock]
        };
        assert_eq!(flags(VerifierFeatures::detect_by(&|_, _, _| true)), [true; 4]);
        assert_eq!(VerifierFeatures::detect_by(&|_, _, _| false), VerifierFeatures::NONE);
        for (index, (program, helper)) in [
            (PROG_SOCK_ADDR, SET_RETVAL),
            (PROG_SOCK_OPS, GET_NETNS_COOKIE),
            (PROG_CGROUP_SKB, GET_NETNS_COOKIE),
            (PROG_SOCK_ADDR, SKC_TO_MPTCP_SOCK),
        ]
        .into_iter()
        .enumerate()
        {
            let mut expected = [true; 4];
            expected[index] = false;
            assert_eq!(flags(detect_without(program, helper)), expected, "{program}: {helper}");
        }
        let unread = detect_without(PROG_SOCK_OPS, PROBE_READ_KERNEL);
        assert_eq!(unread.v6_only, SocketBit::default());
        for helper in [GET_CURRENT_TASK, PROBE_READ_KERNEL] {
            let unread = detect_without(PROG_SOCK_ADDR, helper);
            assert_eq!(unread.kernel_thread, TaskFlag::default(), "{helper}");
        }
    }

    #[test]
    fn tcp_is_refused_with_econnrefused_unless_neither_errno_nor_kernel_threads_are_known() {
        const NONE: VerifierFeatures = VerifierFeatures::NONE;
        assert!(!NONE.refuses_tcp_with_econnrefused());
        assert!(VerifierFeatures { set_retval: true, ..NONE }.refuses_tcp_with_econnrefused());
        let kernel_thread = TaskFlag { mask: KERNEL_THREAD_FLAG, ..TaskFlag::default() };
        assert!(VerifierFeatures { kernel_thread, ..NONE }.refuses_tcp_with_econnrefused());
    }
}
