//! Shell: one run of a qemu virtual machine.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result};

use crate::sh;

/// Accelerator of a virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum VmAccelerator {
    /// Hardware virtualisation by the processor
    Kvm,
    /// Emulation in software, ten times as slow and available everywhere
    Tcg,
}

impl VmAccelerator {
    /// Finds the faster one that this machine supports. `/dev/kvm` alone is no proof: without the processor's own
    /// virtualisation behind it, it may run only kernels that are built for that.
    pub(crate) fn find() -> Self {
        let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let flags = cpu.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
        let virtualises = flags.split(' ').any(|flag| matches!(flag, "vmx" | "svm"));
        let opens = || fs::File::options().read(true).write(true).open("/dev/kvm").is_ok();
        if virtualises && opens() { Self::Kvm } else { Self::Tcg }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }

    fn flags(self) -> [&'static str; 4] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Self::Tcg => ["-accel", "tcg,thread=multi", "-cpu", "max"],
        }
    }
}

/// A machine that runs once.
#[derive(Debug)]
pub(crate) struct VirtualMachine<'a> {
    pub(crate) kernel: &'a Path,
    /// Path of its initramfs.
    pub(crate) initramfs: &'a Path,
    /// Path of the log that receives the kernel's console.
    pub(crate) console: PathBuf,
    pub(crate) accel: VmAccelerator,
    /// Time after which it is stopped in any case.
    pub(crate) timeout: Duration,
}

const MEMORY: &str = "3072";
const CPUS: &str = "2";
/// Command line of the kernel. A panic reboots, which ends the machine because of `-no-reboot`.
const KERNEL_COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 rdinit=/init";
/// Share of all host files with the machine, read only.
const HOST_FILES_SHARE: &str =
    "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap";

impl VirtualMachine<'_> {
    /// Runs the machine to its end, and passes on each line of its job. Only these lines show if the job was done.
    pub(crate) fn run(&self, line: impl FnMut(&str)) -> Result<()> {
        let seconds = self.timeout.as_secs().to_string();
        // Each process is killed when its parent ends, so that a killed xtask leaves no machine behind.
        let die_with_parent = ["--pdeathsig", "KILL"];
        let mut command = Command::new("setpriv");
        command.args(die_with_parent).args(["timeout", "--foreground", "--kill-after=5", &seconds]);
        command.arg("setpriv").args(die_with_parent).arg("qemu-system-x86_64");
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        command.args(self.accel.flags()).args(["-m", MEMORY, "-smp", CPUS]);
        command.arg("-kernel").arg(self.kernel).arg("-initrd").arg(self.initramfs);
        command.args(["-append", KERNEL_COMMAND_LINE]);
        // The first serial line is the kernel's console, the second the job's output.
        command.arg("-serial").arg(format!("file:{}", self.console.display()));
        command.args(["-serial", "stdio", "-fsdev", HOST_FILES_SHARE]);
        command.args(["-device", "virtio-9p-pci,fsdev=host,mount_tag=host"]);
        command.stdin(Stdio::null());
        // qemu's exit status is ignored: the lines of the job show more.
        sh::run_with_lines(&mut command, line).map(drop)
    }

    /// Last lines of the kernel's console.
    pub(crate) fn console_tail(&self) -> Result<String> {
        const LINES: usize = 12;
        let console = fs::read(&self.console)
            .with_context(|| format!("cannot read {}", self.console.display()))?;
        let console = String::from_utf8_lossy(&console);
        let lines: Vec<&str> = console.lines().map(str::trim_end).collect();
        Ok(lines[lines.len().saturating_sub(LINES)..].join("\n"))
    }
}
