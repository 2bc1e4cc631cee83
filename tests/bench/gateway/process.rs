//! Shell: processes of the bench: each on one core, in cgroups of its own, and ended with the bench.

use std::{
    fs::{self, File},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};

/// Timeout of the start of a process, and of the removal of its cgroups.
const WAIT_TIMEOUT: Duration = Duration::from_secs(20);
/// Length of the end of a process's log that an error shows.
const SHOWN_LOG_BYTES: usize = 2_000;

/// A running process, killed on drop with all that it has started.
#[derive(Debug)]
pub(crate) struct BenchProcess {
    child: Child,
    name: String,
    log: PathBuf,
    cgroups: ProcessCgroups,
}

/// Cgroups of one process: one in the unified hierarchy, and one in that of memory where cgroup v1 has it. Dropping
/// them removes them, once the process has ended.
#[derive(Debug)]
struct ProcessCgroups {
    unified: PathBuf,
    memory_v1: Option<PathBuf>,
}

impl BenchProcess {
    /// Starts `command`, a program with its arguments, on a core. Its output goes to a file in `folder`.
    ///
    /// It must be called on the main thread: the process is killed when the thread that starts it ends.
    pub(crate) fn start(
        name: &str,
        core: usize,
        folder: &Path,
        command: &[String],
    ) -> Result<Self> {
        // The shell enters the cgroups itself before `exec`, so that no memory is charged to others.
        const ENTER: &str = r#"for it in "$1" "$2"; do echo $$ > "$it/cgroup.procs" || exit 1; done; shift 2; exec "$@""#;
        let cgroups = ProcessCgroups::create(name)?;
        let log = folder.join(format!("{name}.log"));
        let output =
            File::create(&log).with_context(|| format!("cannot make {}", log.display()))?;
        let errors = output.try_clone().context("cannot share a file")?;
        let mut sh = Command::new("sh");
        sh.args(["-c", ENTER, "sh"]).arg(&cgroups.unified).arg(cgroups.memory());
        sh.args(["setpriv", "--pdeathsig", "KILL", "taskset", "-c", &core.to_string()]);
        // Variables of the user, such as those that set the activator, are no part of the comparison.
        let path =
            std::env::var_os("PATH").unwrap_or_else(|| "/usr/sbin:/usr/bin:/sbin:/bin".into());
        sh.args(command).env_clear().env("PATH", path).env("RUST_LOG", "warn");
        sh.env("NO_COLOR", "1").stdin(Stdio::null()).stdout(output).stderr(errors);
        let child = sh.spawn().context("cannot start sh")?;
        Ok(Self { child, name: name.to_owned(), log, cgroups })
    }

    /// Waits until the process accepts connections at all of these addresses.
    pub(crate) fn wait_until_listening(&mut self, addresses: &[SocketAddr]) -> Result<()> {
        let until = Instant::now() + WAIT_TIMEOUT;
        for address in addresses {
            while TcpStream::connect_timeout(address, WAIT_TIMEOUT).is_err() {
                if let Some(status) = self.child.try_wait()? {
                    bail!("{} ended with {status}: {}", self.name, self.last_log());
                }
                let is_late = Instant::now() >= until;
                ensure!(
                    !is_late,
                    "{} does not listen on {address}: {}",
                    self.name,
                    self.last_log()
                );
                pause(Duration::from_millis(20));
            }
        }
        Ok(())
    }

    /// Memory of the process and of its sockets, in bytes, as the kernel charges it to the cgroup.
    ///
    /// Before Linux 6.12 the structures of accepted sockets may be charged to the client that connected.
    pub(crate) fn memory_bytes(&self) -> Result<f64> {
        self.cgroups.memory_bytes()
    }

    fn last_log(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let begin = text.len().saturating_sub(SHOWN_LOG_BYTES);
        String::from_utf8_lossy(&text[begin..]).into_owned()
    }
}

impl Drop for BenchProcess {
    fn drop(&mut self) {
        // Since Linux 5.14; before, only processes that leave their parent stay, and none of these does.
        let _older_kernel = fs::write(self.cgroups.unified.join("cgroup.kill"), "1");
        let _ended_already = self.child.kill();
        let _waited_already = self.child.wait();
    }
}

impl ProcessCgroups {
    /// Creates the cgroups. Their names have the bench's process id and `name`.
    fn create(name: &str) -> Result<Self> {
        let mounts =
            fs::read_to_string("/proc/self/mountinfo").context("cannot read the mounts")?;
        let unified = find_mount(&mounts, "cgroup2", "").context("cgroup v2 is not mounted")?;
        let directory = format!("rouse_gateway-{}-{name}", std::process::id());
        let memory_v1 = find_mount(&mounts, "cgroup", "memory").map(|it| it.join(&directory));
        // From here on a failure removes what exists already.
        let cgroups = Self { unified: unified.join(directory), memory_v1 };
        cgroups.create_directories()?;
        Ok(cgroups)
    }

    fn create_directories(&self) -> Result<()> {
        for path in [Some(&self.unified), self.memory_v1.as_ref()].into_iter().flatten() {
            fs::create_dir(path).with_context(|| format!("cannot make {}", path.display()))?;
        }
        if let Some(memory) = &self.memory_v1 {
            // cgroup v1 counts the buffers of sockets only in cgroups with a limit for them.
            let limit = memory.join("memory.kmem.tcp.limit_in_bytes");
            let _absent = fs::write(limit, i64::MAX.to_string());
        }
        Ok(())
    }

    /// Cgroup that counts memory, as far as it is known; else that of the unified hierarchy.
    fn memory(&self) -> &Path {
        self.memory_v1.as_ref().unwrap_or(&self.unified)
    }

    fn memory_bytes(&self) -> Result<f64> {
        if let Some(memory) = &self.memory_v1 {
            let pages = read_number(&memory.join("memory.usage_in_bytes"))?;
            // The second file is absent where the kernel was built without it; the first one then has all there is.
            let buffers = memory.join("memory.kmem.tcp.usage_in_bytes");
            return Ok(pages + if buffers.exists() { read_number(&buffers)? } else { 0.0 });
        }
        let file = self.unified.join("memory.current");
        ensure!(file.exists(), "the memory controller is off for {}", self.unified.display());
        read_number(&file)
    }
}

impl Drop for ProcessCgroups {
    fn drop(&mut self) {
        for path in [Some(&self.unified), self.memory_v1.as_ref()].into_iter().flatten() {
            let until = Instant::now() + WAIT_TIMEOUT;
            // The last process leaves its cgroup a little after it has been waited for.
            while path.exists() && fs::remove_dir(path).is_err() && Instant::now() < until {
                pause(Duration::from_millis(10));
            }
        }
    }
}

fn read_number(file: &Path) -> Result<f64> {
    let text =
        fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    text.trim().parse().with_context(|| format!("{} has no number", file.display()))
}

/// Mount point of the file system `kind` with an option, which may be empty, in the text of a mountinfo file.
fn find_mount(mounts: &str, kind: &str, option: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        // proc_pid_mountinfo(5): field 5 is the mount point; ` - ` precedes type, source and options.
        let (fields, file_system) = line.split_once(" - ")?;
        let mut file_system = file_system.split(' ');
        let is_kind = file_system.next() == Some(kind);
        let options = file_system.nth(1).unwrap_or_default();
        let has_option = option.is_empty() || options.split(',').any(|it| it == option);
        (is_kind && has_option).then(|| fields.split(' ').nth(4).map(PathBuf::from))?
    })
}

/// Sleeps for a while.
#[allow(clippy::disallowed_methods, reason = "no runtime on these threads")]
pub(crate) fn pause(time: Duration) {
    thread::sleep(time);
}
