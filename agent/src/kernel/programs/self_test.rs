//! Shell: self-test, which proves that the eBPF programs see the events below the pods' cgroup.

use std::{fs, io, path::Path};

use datapath::abi;
use tracing::warn;

use super::{EbpfPrograms, EbpfProgramsError, make_folder};
use crate::{
    clock::monotonic_ns,
    kernel::{maps::KernelMaps, netns_cookies, sys},
};

impl EbpfPrograms {
    /// Proves that the programs see events below the pods' cgroup: a process there connects to the frontend of the
    /// self-test, sends it a datagram, and listens. Takes a few milliseconds; blocks.
    pub fn verify_by_self_test(&self, maps: &mut KernelMaps) -> Result<(), EbpfProgramsError> {
        if self.follows_previous {
            // The other version's programs see the self-test, and count it in their own maps.
            return Ok(());
        }
        let cgroup = self.paths.pods.join(format!("rouse-self-test-{}", std::process::id()));
        make_folder(&cgroup)?;
        let result = self.run_self_test(&cgroup, maps);
        // The process has just been waited for. A busy folder is removed at the next call, before it is made again.
        if let Err(error) = fs::remove_dir(&cgroup) {
            warn!(cgroup = %cgroup.display(), %error, "cannot remove the self-test's cgroup");
        }
        result
    }

    /// Makes a connect, a datagram and a listener in the cgroup, and compares them with what the programs have counted.
    fn run_self_test(&self, cgroup: &Path, maps: &mut KernelMaps) -> Result<(), EbpfProgramsError> {
        let failed = |what: String| EbpfProgramsError::SelfTest { cgroup: cgroup.to_owned(), what };
        let words = [abi::CONTROL_SELF_TEST, abi::CONTROL_SELF_TEST_DATAGRAMS];
        let (before, began_ns) = (words.map(|word| maps.control_word(word)), monotonic_ns());
        let process = sys::SelfTestProcess::start(cgroup, None)
            .map_err(|e| failed(format!("it did not run: {e}")))?;
        let report = process.report();
        let [connects_seen, datagrams_seen] =
            [0, 1].map(|at| maps.control_word(words[at]).wrapping_sub(before[at]));
        if connects_seen < u64::from(report.connects) {
            let mut what = format!("its connect was not seen (errno {})", report.connect_errno);
            // Each address family has a program of its own, so one of them may be called and the other not.
            if connects_seen > 0 {
                what = "its IPv6 connect was not seen".into();
            }
            if report.enter_errno != 0 {
                let entering = io::Error::from_raw_os_error(report.enter_errno);
                what += &format!(", and it could not enter the cgroup: {entering}");
            }
            return Err(failed(what));
        }
        if datagrams_seen == 0 {
            return Err(failed(format!("its datagram was not seen (errno {})", report.send_errno)));
        }
        if report.port == 0 {
            return Err(failed(format!("it could not listen (errno {})", report.listen_errno)));
        }
        let cookie = match report.cookie {
            // The kernel gives no cookie: the namespace is the one whose listener has just opened.
            0 => {
                netns_cookies::listening_namespaces(&maps.listen_entries()?, report.port, began_ns)
                    .first()
                    .copied()
            }
            reported => Some(reported),
        };
        let cookie = cookie.unwrap_or_default();
        let listener = maps.listener(cookie, report.port)?;
        // Dropped first: a close after the removal would leave an entry with a count below zero.
        drop(process);
        maps.delete_listener(cookie, report.port)?;
        if listener.loopback == 0 {
            return Err(failed(format!("its listen on port {} was not seen", report.port)));
        }
        Ok(())
    }
}
