//! Shell: a virtual machine of qemu's, from its start to its end.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result};

use crate::sh;

/// What runs a machine's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Accel {
    /// The processor
    Kvm,
    /// A program, ten times as slow and everywhere
    Tcg,
}

impl Accel {
    /// The faster one that this machine has. `/dev/kvm` alone is no proof: where it stands for something else than the
    /// processor's own virtualisation, it may run only kernels that are made for that.
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

/// A machine to be run once.
#[derive(Debug)]
pub(crate) struct Machine<'a> {
    pub(crate) kernel: &'a Path,
    /// Its first files.
    pub(crate) initramfs: &'a Path,
    /// Where what the kernel says goes.
    pub(crate) console: PathBuf,
    pub(crate) accel: Accel,
    /// When it is stopped, whatever it does.
    pub(crate) limit: Duration,
}

const MEMORY: &str = "3072";
const CPUS: &str = "2";
/// A kernel that panics starts anew, which ends the machine.
const KERNEL_WORDS: &str = "console=ttyS0 quiet panic=-1 rdinit=/init";
/// All of the host's files, read only.
const FILES: &str = "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap";

impl Machine<'_> {
    /// Runs it to its end, and hands on each line that its job says. Whether the job was done is for those lines to say.
    pub(crate) fn run(&self, line: impl FnMut(&str)) -> Result<()> {
        let seconds = self.limit.as_secs().to_string();
        // Each ends when the one that started it does, so that nothing stays behind a killed xtask.
        let ends = ["--pdeathsig", "KILL"];
        let mut command = Command::new("setpriv");
        command.args(ends).args(["timeout", "--foreground", "--kill-after=5", &seconds]);
        command.arg("setpriv").args(ends).arg("qemu-system-x86_64");
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        command.args(self.accel.flags()).args(["-m", MEMORY, "-smp", CPUS]);
        command.arg("-kernel").arg(self.kernel).arg("-initrd").arg(self.initramfs);
        command.args(["-append", KERNEL_WORDS]);
        // The first serial line is the kernel's, the second the job's.
        command.arg("-serial").arg(format!("file:{}", self.console.display()));
        command.args(["-serial", "stdio", "-fsdev", FILES]);
        command.args(["-device", "virtio-9p-pci,fsdev=host,mount_tag=host"]);
        command.stdin(Stdio::null());
        // Its own word on how it ended says less than the lines do.
        sh::watch(&mut command, line).map(drop)
    }

    /// The end of what the kernel said.
    pub(crate) fn last_words(&self) -> Result<String> {
        const LINES: usize = 12;
        let said = fs::read(&self.console)
            .with_context(|| format!("cannot read {}", self.console.display()))?;
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<&str> = said.lines().map(str::trim_end).collect();
        Ok(lines[lines.len().saturating_sub(LINES)..].join("\n"))
    }
}
