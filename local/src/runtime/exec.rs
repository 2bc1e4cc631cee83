//! Shell: commands inside a running container, for exec probes.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::sys::memfd::{MFdFlags, memfd_create};
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

use super::{OciRuntime, OciRuntimeError, file_error, tracked::RuntimeProcess};
use crate::cgroups::ContainerCgroup;
use crate::process::{ProcessId, child_pids, exit_code};
use crate::sys::{self, SharedFd};

/// Bytes of a command's output that are kept, enough to name the cause of a failure.
const MAX_OUTPUT_BYTES: u64 = 1024;
/// Number of times that a command is killed before its runtime is: the command may begin only after the first.
const STOP_ROUNDS: u32 = 10;
/// Time that the runtime has to end by itself after each.
const STOP_ROUND: Duration = Duration::from_millis(100);

/// A command to be run inside a container.
#[derive(Debug)]
pub struct ExecRequest {
    /// Name under which the runtime knows the container.
    pub id: String,
    /// Folder of the container's bundle; the command's pid file is written there.
    pub bundle: PathBuf,
    /// Program of the command, then its arguments.
    pub command: Vec<String>,
    /// Cgroup of the container, where the command runs.
    pub cgroup: ContainerCgroup,
}

/// Result of a command inside a container.
#[derive(Debug)]
pub struct ExecResult {
    /// Exit code, or 128 + signal after a signal; `None` if the command took too long and was killed.
    pub code: Option<i32>,
    /// First bytes of standard output and error.
    pub output: String,
}

/// A command that runs, with its output.
struct StartedExec {
    child: RuntimeProcess,
    output: File,
    pid_file: PathBuf,
}

impl OciRuntime {
    /// Runs a command inside a container, and kills it after `time_limit`.
    pub async fn exec(
        &self,
        exec: ExecRequest,
        time_limit: Duration,
    ) -> Result<ExecResult, OciRuntimeError> {
        let runtime = self.clone();
        let started =
            self.run_on_thread::<_, OciRuntimeError>(move || runtime.start_exec(&exec)).await?;
        let runtime = self.clone();
        // A task of its own: it reaps the runtime even if the caller's task is dropped.
        let finished = tokio::spawn(async move { runtime.finish_exec(started, time_limit).await });
        finished.await.ok().ok_or(OciRuntimeError::ThreadsEnded)?
    }

    /// Starts the runtime's `exec` in the container's cgroup.
    fn start_exec(&self, exec: &ExecRequest) -> Result<StartedExec, OciRuntimeError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let pid_file = exec.bundle.join(format!("exec-{number}.pid"));
        // A memfd needs no file to be removed later, and its pages count as the container's memory.
        let output = memfd_create(c"exec", MFdFlags::MFD_CLOEXEC).map_err(io::Error::from);
        let output =
            output.map(File::from).map_err(file_error("keep the output of", &self.program))?;
        let null = File::open("/dev/null").map_err(file_error("open", Path::new("/dev/null")))?;
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mut argv = self.base_argv();
        let options = ["exec".to_owned(), "--pid-file".to_owned(), text(&pid_file)];
        argv.extend(options.into_iter().chain([exec.id.clone()]));
        argv.extend(exec.command.iter().cloned());
        let stdio = [null.as_fd(), output.as_fd(), output.as_fd()];
        let child = self.spawn(&argv, &exec.cgroup, stdio)?;
        Ok(StartedExec { child, output, pid_file })
    }

    /// Waits for a command, kills it after `time_limit`, and collects its exit code and output.
    async fn finish_exec(
        &self,
        started: StartedExec,
        time_limit: Duration,
    ) -> Result<ExecResult, OciRuntimeError> {
        let StartedExec { child, mut output, pid_file } = started;
        // After an error no task waits for this runtime: `reap_helpers` reaps it.
        let watched = sys::watch_readable(Arc::clone(child.pidfd()))
            .map_err(file_error("watch", &self.program))?;
        let in_time = timeout(time_limit, watched.readable()).await.is_ok();
        if !in_time {
            stop_command(&child, &pid_file, &watched).await;
        }
        let code = exit_code(child.pidfd()).unwrap_or(-1);
        drop(child);
        let _ = fs::remove_file(&pid_file);
        let mut text = Vec::new();
        // An error here costs only the output; the exit code still decides.
        let _ = output.rewind().and_then(|()| output.take(MAX_OUTPUT_BYTES).read_to_end(&mut text));
        let output = String::from_utf8_lossy(&text).into_owned();
        Ok(ExecResult { code: in_time.then_some(code), output })
    }
}

/// Kills a command and waits for the end of its runtime, which is killed if it does not end by itself.
async fn stop_command(child: &RuntimeProcess, pid_file: &Path, watched: &AsyncFd<SharedFd>) {
    for _ in 0..STOP_ROUNDS {
        // The command is killed first: its runtime then reaps it and ends by itself. Before the pid file exists, the
        // command is known only as a descendant of the runtime, and the runtime may start it only now.
        kill_command(pid_file);
        kill_descendants(child.pid);
        if timeout(STOP_ROUND, watched.readable()).await.is_ok() {
            return;
        }
    }
    let _gone = sys::pidfd_signal(child.as_fd(), libc::SIGKILL);
    let _ = watched.readable().await;
}

/// Kills all processes that a process has started, directly or not.
fn kill_descendants(pid: i32) {
    let mut pids = child_pids(pid);
    let mut processes = Vec::new();
    // Listed before any is killed: afterwards the children of a killed process belong to another one.
    while let Some(pid) = pids.pop() {
        processes.extend(ProcessId::from_pid(pid).and_then(ProcessId::open));
        pids.extend(child_pids(pid));
    }
    for process in processes {
        let _gone = sys::pidfd_signal(process.as_fd(), libc::SIGKILL);
    }
}

/// Kills the command of a pid file, if it still runs.
fn kill_command(pid_file: &Path) {
    let pid = fs::read_to_string(pid_file).ok().and_then(|text| text.trim().parse().ok());
    if let Some(process) = pid.and_then(ProcessId::from_pid).and_then(|process| process.open()) {
        let _gone = sys::pidfd_signal(process.as_fd(), libc::SIGKILL);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::process::{Command, Stdio};

    use nix::unistd::Pid;

    use super::{super::tracked::RuntimeProcesses, *};

    #[tokio::test]
    async fn a_command_without_a_pid_file_is_killed_with_its_runtime() {
        // As a runtime that has started the command, and has not yet written its pid.
        let mut runtime = Command::new("sh");
        runtime.args(["-c", "sleep 60 & echo $!; wait"]).stdout(Stdio::piped());
        let mut runtime = runtime.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(runtime.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let command = ProcessId::from_pid(line.trim().parse().unwrap()).unwrap();
        let pid = Pid::from_raw(i32::try_from(runtime.id()).unwrap());
        let process = RuntimeProcesses::default();
        let process = process.start(|| sys::pidfd_open(pid).map(|pidfd| (pid, pidfd))).unwrap();
        let watched = sys::watch_readable(Arc::clone(process.pidfd())).unwrap();
        stop_command(&process, Path::new("/none"), &watched).await;
        assert!(!command.is_alive());
        runtime.wait().unwrap();
    }
}
