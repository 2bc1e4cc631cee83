//! Shell: the OCI runtime, `crun` or else `runc`, and the threads on which it runs.
//!
//! Runtime and mounts live on threads with a mount namespace of their own. There, cgroup2 is mounted over
//! /sys/fs/cgroup, so that the runtime sees a pure v2 machine (crun refuses hybrid ones). The containers' root file
//! systems are mounted there too: a container keeps its own copy of that mount, and a killed node leaves none behind.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::wait::WaitStatus;
use nix::unistd::Pid;
use thiserror::Error;
use tokio::sync::oneshot;

use crate::cgroups::ContainerCgroup;
use crate::process::{ProcessId, wait_for_child};
use crate::sys;

mod exec;
mod mounts;
mod tracked;

pub use exec::{ExecRequest, ExecResult};
use mounts::{PendingUnmounts, enter_private_mounts, mount_root, mount_sub_path};
use tracked::{RuntimeProcess, RuntimeProcesses};

/// Threads that start containers. A start is mostly kernel work under global locks; more threads would only wait.
const WORKER_THREADS: usize = 4;

/// Supported OCI runtimes, in order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OciRuntimeKind {
    /// crun, written in C; starts a container in a third of runc's time.
    Crun,
    /// runc, the reference implementation in Go.
    Runc,
}

/// Failure while a container is started, deleted, or runs a command.
#[derive(Debug, Error)]
pub enum OciRuntimeError {
    /// Neither runtime is installed.
    #[error("neither crun nor runc is installed: apt-get install crun")]
    NotInstalled,
    /// A file, mount or program of the container failed.
    #[error("cannot {attempt} {path}")]
    File {
        /// Operation that failed, as a verb phrase: "open", "mount".
        attempt: &'static str,
        /// Path of the file, mount or program.
        path: PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// The runtime ended with an error.
    #[error("{runtime} could not start the container: {message}")]
    RuntimeFailed {
        /// Name of the runtime: `crun` or `runc`.
        runtime: &'static str,
        /// Newest message of its log, or else its exit status.
        message: String,
    },
    /// The runtime's threads are gone, so no job can run.
    #[error("the runtime's threads have ended")]
    ThreadsEnded,
}

/// Returns a closure that wraps an I/O error with the operation and its path.
fn file_error(attempt: &'static str, path: &Path) -> impl FnOnce(io::Error) -> OciRuntimeError {
    let path = path.to_owned();
    move |source| OciRuntimeError::File { attempt, path, source }
}

/// A container about to be started.
#[derive(Debug)]
pub struct ContainerLaunch {
    /// Container ID for the runtime, unique on the node.
    pub id: String,
    /// Bundle folder with the container's `config.json`.
    pub bundle: PathBuf,
    /// Folder with the image's files, the lower layer.
    pub image: PathBuf,
    /// Folder of the container's writable layer; emptied before the start.
    pub writable_layer: PathBuf,
    /// Log file that receives standard output and error.
    pub log: PathBuf,
    /// Host uid that may open the output again (`/dev/stdout`).
    pub user: u32,
    /// Cgroup in which the first process is created.
    pub cgroup: ContainerCgroup,
    /// The pod's network namespace; `config.json` names this descriptor, so it stays open until the start is over.
    pub network: OwnedFd,
    /// Parts of volumes to be mounted before the start.
    pub sub_paths: Vec<SubPathMount>,
}

/// Part of a volume that `subPath` names, opened in the mount namespace of the runtime's threads.
#[derive(Debug)]
pub struct SubPathMount {
    /// Descriptor of the folder or file (`O_PATH`).
    pub source: OwnedFd,
    /// Path at which the runtime's threads mount it, and from which `config.json` mounts it.
    pub mount_point: PathBuf,
}

/// A container whose process runs.
#[derive(Debug)]
pub struct LaunchedContainer {
    /// First process of the container.
    pub process: ProcessId,
    /// Descriptor of that process, a pidfd.
    pub pidfd: OwnedFd,
    /// Time that mounting the root file system took.
    pub mount_time: Duration,
    /// Time from the mount to the end of the runtime's `run`.
    pub runtime_time: Duration,
}

type RuntimeJob = Box<dyn FnOnce() + Send>;

/// The OCI runtime and the threads on which it runs.
#[derive(Clone, Debug)]
pub struct OciRuntime {
    kind: OciRuntimeKind,
    program: PathBuf,
    state_folder: PathBuf,
    runtime_cgroup: Arc<OwnedFd>,
    pending_unmounts: PendingUnmounts,
    processes: RuntimeProcesses,
    jobs: mpsc::Sender<RuntimeJob>,
}

impl OciRuntime {
    /// Finds the runtime (`wanted`, or crun before runc) and starts its threads.
    ///
    /// `state_folder` is the runtime's state folder (`--root`). Runtime processes that move their container themselves
    /// (runc), or that start none (`delete`), are created in `runtime_cgroup`.
    pub fn start(
        wanted: Option<OciRuntimeKind>,
        state_folder: PathBuf,
        runtime_cgroup: OwnedFd,
    ) -> Result<Self, OciRuntimeError> {
        let kinds = [(OciRuntimeKind::Crun, "crun"), (OciRuntimeKind::Runc, "runc")];
        let fitting = kinds.iter().filter(|(kind, _)| wanted.is_none_or(|wanted| wanted == *kind));
        let runtime = fitting.filter_map(|(kind, name)| Some((*kind, find_program(name)?))).next();
        let (kind, program) = runtime.ok_or(OciRuntimeError::NotInstalled)?;
        let (jobs, inbox) = mpsc::channel::<RuntimeJob>();
        let (ready, started) = mpsc::channel();
        let (pending_unmounts, unmounting) = PendingUnmounts::new();
        let first = move || {
            let entered = enter_private_mounts();
            let usable = entered.is_ok();
            let _ = ready.send(entered);
            if usable {
                // Without the unmount thread the mounts disappear with the process.
                let _ = thread::Builder::new().name("unmount".to_owned()).spawn(unmounting);
                run_workers(inbox);
            }
        };
        // Only this first thread unshares its mounts; the threads that it starts inherit the namespace.
        let spawned = thread::Builder::new().name("runtime".to_owned()).spawn(first);
        spawned.map_err(file_error("start a thread for", &program))?;
        started.recv().ok().ok_or(OciRuntimeError::ThreadsEnded)??;
        let (runtime_cgroup, processes) = (Arc::new(runtime_cgroup), RuntimeProcesses::default());
        Ok(Self { kind, program, state_folder, runtime_cgroup, pending_unmounts, processes, jobs })
    }

    /// Returns the name of the runtime's program.
    pub fn name(&self) -> &'static str {
        match self.kind {
            OciRuntimeKind::Crun => "crun",
            OciRuntimeKind::Runc => "runc",
        }
    }

    /// Runs `job` on one of the runtime's threads and returns its result.
    async fn run_on_thread<T: Send + 'static, E: From<OciRuntimeError> + Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T, E> {
        let (reply_tx, reply_rx) = oneshot::channel();
        let job = Box::new(move || {
            // Once the caller's task is gone, the result is not needed, and the node may have been removed.
            if !reply_tx.is_closed() {
                drop(reply_tx.send(job()));
            }
        });
        self.jobs.send(job).ok().ok_or(OciRuntimeError::ThreadsEnded)?;
        reply_rx.await.ok().ok_or(OciRuntimeError::ThreadsEnded)?
    }

    /// Prepares and starts a container on one of the threads; returns once its process runs the user's program.
    pub async fn run_container<E: From<OciRuntimeError> + Send + 'static>(
        &self,
        prepare: impl FnOnce() -> Result<ContainerLaunch, E> + Send + 'static,
    ) -> Result<LaunchedContainer, E> {
        let runtime = self.clone();
        self.run_on_thread(move || Ok(runtime.launch(&prepare()?)?)).await
    }

    /// Mounts the root file system and the parts of volumes, and runs the runtime. The calling thread must see the
    /// private mounts.
    fn launch(&self, launch: &ContainerLaunch) -> Result<LaunchedContainer, OciRuntimeError> {
        let begin = Instant::now();
        let root = launch.bundle.join("rootfs");
        self.pending_unmounts.unmount_queued(&root);
        mount_root(launch, &root)?;
        let mounted_sub_paths = launch.sub_paths.iter().try_for_each(|sub_path| {
            self.pending_unmounts.unmount_queued(&sub_path.mount_point);
            mount_sub_path(sub_path)
        });
        let mounted = Instant::now();
        let started = mounted_sub_paths.and_then(|()| self.run_detached(launch));
        // Also after a failed start: the mounts must not stay.
        let mount_points = launch.sub_paths.iter().map(|sub_path| sub_path.mount_point.clone());
        mount_points.chain([root]).for_each(|point| self.pending_unmounts.defer_unmount(point));
        let (process, pidfd) = started?;
        let (mount_time, runtime_time) = (mounted - begin, mounted.elapsed());
        Ok(LaunchedContainer { process, pidfd, mount_time, runtime_time })
    }

    /// Calls the runtime's `run --detach` and waits for its end; the container's process then runs.
    fn run_detached(
        &self,
        launch: &ContainerLaunch,
    ) -> Result<(ProcessId, OwnedFd), OciRuntimeError> {
        let log = open_log(&launch.log, launch.user)?;
        let null = File::open("/dev/null").map_err(file_error("open", Path::new("/dev/null")))?;
        let pid_file = launch.bundle.join("pid");
        let messages = launch.bundle.join("runtime.log");
        // Files of an earlier run would be read as the results of this one.
        let _ = fs::remove_file(&pid_file);
        let _ = fs::remove_file(&messages);
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mut argv = self.base_argv();
        argv.extend([
            "--log".to_owned(),
            text(&messages),
            "--log-format".to_owned(),
            "json".to_owned(),
        ]);
        argv.extend([
            "run".to_owned(),
            "--detach".to_owned(),
            "--bundle".to_owned(),
            text(&launch.bundle),
        ]);
        argv.extend(["--pid-file".to_owned(), text(&pid_file), launch.id.clone()]);
        let stdio = [null.as_fd(), log.as_fd(), log.as_fd()];
        let child = self.spawn(&argv, &launch.cgroup, stdio)?;
        // `run --detach` ends once the container's process executes the user's program.
        match wait_for_child(child.pidfd()) {
            Ok(WaitStatus::Exited(_, 0)) => {}
            other => {
                let message = last_log_message(&messages).unwrap_or_else(|| format!("{other:?}"));
                return Err(OciRuntimeError::RuntimeFailed { runtime: self.name(), message });
            }
        }
        let text = fs::read_to_string(&pid_file).map_err(file_error("read", &pid_file))?;
        let pid =
            text.trim().parse().map_err(io::Error::other).map_err(file_error("read", &pid_file))?;
        let pidfd = sys::pidfd_open(Pid::from_raw(pid)).map_err(file_error("watch", &pid_file))?;
        // The process may have ended by now; without its start time a reused pid could not be told from it.
        let not_found = || file_error("watch", &pid_file)(io::Error::from(io::ErrorKind::NotFound));
        Ok((ProcessId::from_pid(pid).ok_or_else(not_found)?, pidfd))
    }

    /// Starts the runtime in the cgroup that its container needs.
    fn spawn(
        &self,
        argv: &[String],
        cgroup: &ContainerCgroup,
        stdio: [BorrowedFd<'_>; 3],
    ) -> Result<RuntimeProcess, OciRuntimeError> {
        let tasks: Vec<_> = cgroup.tasks.iter().map(AsFd::as_fd).collect();
        // runc moves the process itself, and newer versions require the container's group to be empty.
        let parent = match self.kind {
            OciRuntimeKind::Crun => cgroup.dir.as_fd(),
            OciRuntimeKind::Runc => self.runtime_cgroup.as_fd(),
        };
        let command = self.command(argv)?;
        self.processes
            .start(|| command.spawn(parent, &tasks, stdio))
            .map_err(file_error("run", &self.program))
    }

    /// Returns true if `pid` is a process of the runtime whose exit code this process reads.
    pub fn is_runtime_process(&self, pid: i32) -> bool {
        self.processes.contains(pid)
    }

    /// Deletes the runtime's state of a container whose process has ended.
    pub async fn delete(&self, id: String) -> Result<(), OciRuntimeError> {
        let runtime = self.clone();
        self.run_on_thread(move || {
            let result = runtime.run_delete(&id);
            // Also after an error: the next container of this name must find no state.
            let _ = fs::remove_dir_all(runtime.state_folder.join(&id));
            result
        })
        .await
    }

    /// Runs `delete --force` in a cgroup of the node: the node's removal kills it, so it recreates no folder later.
    fn run_delete(&self, id: &str) -> Result<(), OciRuntimeError> {
        let null = File::options().read(true).write(true).open("/dev/null");
        let null = null.map_err(file_error("open", Path::new("/dev/null")))?;
        let mut argv = self.base_argv();
        argv.extend(["delete", "--force", id].map(str::to_owned));
        let stdio = [null.as_fd(); 3];
        let command = self.command(&argv)?;
        let child = self
            .processes
            .start(|| command.spawn(self.runtime_cgroup.as_fd(), &[], stdio))
            .map_err(file_error("run", &self.program))?;
        let _ended = wait_for_child(child.pidfd());
        // Its exit code does not matter: with `--force` it fails only if there is no such state.
        Ok(())
    }

    /// Returns the program and the options that precede any of its commands.
    fn base_argv(&self) -> Vec<String> {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mut argv = vec![text(&self.program), "--root".to_owned(), text(&self.state_folder)];
        argv.extend(
            (self.kind == OciRuntimeKind::Crun).then(|| "--cgroup-manager=disabled".to_owned()),
        );
        argv
    }

    fn command(&self, argv: &[String]) -> Result<sys::CgroupCommand, OciRuntimeError> {
        let env = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin".to_owned()];
        sys::CgroupCommand::new(argv, &env)
            .map_err(|error| file_error("run", &self.program)(error.into()))
    }
}

/// Returns the newest message of the runtime's JSON log.
fn last_log_message(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().rev().find(|line| !line.trim().is_empty())?;
    let value: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
    let message = value.get("msg").and_then(|message| message.as_str()).unwrap_or(line);
    Some(message.trim().to_owned())
}

/// Finds a program in the usual folders; the caller's `PATH` does not count.
fn find_program(name: &str) -> Option<PathBuf> {
    let folders = ["/usr/local/bin", "/usr/local/sbin", "/usr/bin", "/usr/sbin", "/bin", "/sbin"];
    folders.iter().map(|folder| Path::new(folder).join(name)).find(|path| path.exists())
}

/// Runs jobs on this thread and its siblings, until all senders are gone.
fn run_workers(inbox: mpsc::Receiver<RuntimeJob>) {
    let inbox = Arc::new(Mutex::new(inbox));
    let serve = |inbox: Arc<Mutex<mpsc::Receiver<RuntimeJob>>>| {
        loop {
            let job = inbox.lock().unwrap_or_else(PoisonError::into_inner).recv();
            match job {
                Ok(job) => job(),
                Err(mpsc::RecvError) => return,
            }
        }
    };
    for number in 1..WORKER_THREADS {
        let inbox = Arc::clone(&inbox);
        // Fewer threads make starts slower, not wrong.
        let _ =
            thread::Builder::new().name(format!("runtime-{number}")).spawn(move || serve(inbox));
    }
    serve(inbox);
}

/// Opens a container's log for appending, owned by the container's user.
fn open_log(path: &Path, user: u32) -> Result<File, OciRuntimeError> {
    let opened = OpenOptions::new().append(true).create(true).mode(0o640).open(path);
    let log = opened.map_err(file_error("open the log", path))?;
    fchown(&log, Some(user), None).map_err(file_error("set the owner of the log", path))?;
    Ok(log)
}
