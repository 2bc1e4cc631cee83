//! Shell: `rouse logs`: prints the output of containers, including those of ended pods.

use std::{
    fs::{self, File},
    io::{Read as _, Seek as _, SeekFrom},
    path::PathBuf,
    time::Duration,
};

use controller::model::object::LocalObjectKind;
use local::layout::NodeLayout;

use crate::{args::LogsArgs, command_error::CommandError, kinds, stdout, store::NodeStore};

/// Polling interval of `--follow`.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Log of one container, and the number of bytes printed.
#[derive(Debug)]
struct ContainerLog {
    path: PathBuf,
    /// Prefix of each line where several logs are printed together.
    prefix: String,
    printed: u64,
}

/// Prints the logs, and with `--follow` continues as they grow.
pub(crate) fn logs(
    layout: &NodeLayout,
    store: &NodeStore,
    args: &LogsArgs,
) -> Result<(), CommandError> {
    let mut logs = Vec::new();
    find_new_logs(layout, args, &mut logs)?;
    if logs.is_empty() && !args.follow {
        return Err(no_logs_error(layout, store, args)?);
    }
    for log in &mut logs {
        let text = log.read_new()?;
        stdout::print_text(&log.prefixed(last_lines(&text, args.tail)))?;
    }
    if !args.follow {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    runtime.block_on(async {
        loop {
            // Pods of the service may be created while its logs are followed.
            tokio::time::sleep(POLL_INTERVAL).await;
            find_new_logs(layout, args, &mut logs)?;
            for log in &mut logs {
                let text = log.read_new()?;
                stdout::print_text(&log.prefixed(&text))?;
            }
        }
    })
}

/// Predicate on pod names: true for the pods whose logs are printed.
type PodFilter = Box<dyn Fn(&str) -> bool>;

/// Returns the predicate for `selector`: a pod's name, or `KIND/NAME`.
fn pod_filter(selector: &str) -> Result<PodFilter, CommandError> {
    let Some((kind, name)) = selector.split_once('/') else {
        let name = selector.to_owned();
        return Ok(Box::new(move |pod| pod == name));
    };
    let name = name.to_owned();
    Ok(match kinds::parse_kind(kind)? {
        LocalObjectKind::Pod => Box::new(move |pod| pod == name),
        // These objects have their Revision's name.
        LocalObjectKind::Revision
        | LocalObjectKind::PodAutoscaler
        | LocalObjectKind::ServerlessService => {
            Box::new(move |pod| revision_of_pod(pod) == Some(&name))
        }
        // A Revision is named after its Configuration, and a Configuration after its Service: `hello-00001`.
        LocalObjectKind::Service | LocalObjectKind::Configuration | LocalObjectKind::Route => {
            Box::new(move |pod| {
                let rest =
                    revision_of_pod(pod).and_then(|it| it.strip_prefix(&name)?.strip_prefix('-'));
                rest.is_some_and(|rest| {
                    rest.len() == 5 && rest.bytes().all(|byte| byte.is_ascii_digit())
                })
            })
        }
    })
}

/// Name of the Revision with which a pod's name begins.
fn revision_of_pod(pod: &str) -> Option<&str> {
    pod.rsplit_once("-deployment-").map(|(revision, _)| revision)
}

/// Adds logs that were created since the last call.
fn find_new_logs(
    layout: &NodeLayout,
    args: &LogsArgs,
    logs: &mut Vec<ContainerLog>,
) -> Result<(), CommandError> {
    let is_selected = pod_filter(&args.target)?;
    let prefix = format!("{}_", args.scope.namespace);
    // Folders are named NAMESPACE_POD, and an underscore cannot be in either name.
    let mut new_logs = Vec::new();
    for folder in fs::read_dir(layout.logs()).into_iter().flatten().flatten() {
        let name = folder.file_name().to_string_lossy().into_owned();
        let Some(pod) = name.strip_prefix(&prefix).filter(|pod| is_selected(pod)) else { continue };
        for file in fs::read_dir(folder.path()).into_iter().flatten().flatten() {
            let file = file.path();
            let container = file.file_stem().map(|stem| stem.to_string_lossy().into_owned());
            let container = container.filter(|_| file.extension().is_some_and(|end| end == "log"));
            if let Some(container) = container
                && args.container.as_ref().is_none_or(|wanted| *wanted == container)
            {
                new_logs.push((file, format!("[pod/{pod}/{container}] ")));
            }
        }
    }
    new_logs.sort();
    // A pod named by its own name is the only source, so its lines need no prefix.
    let has_several_logs = new_logs.len() + logs.len() > 1;
    for (path, prefix) in new_logs {
        if !logs.iter().any(|log| log.path == path) {
            let prefix =
                if has_several_logs && args.target.contains('/') { prefix } else { String::new() };
            logs.push(ContainerLog { path, prefix, printed: 0 });
        }
    }
    Ok(())
}

/// Returns the reason why there is nothing to print.
fn no_logs_error(
    layout: &NodeLayout,
    store: &NodeStore,
    args: &LogsArgs,
) -> Result<CommandError, CommandError> {
    let (kind, name) = match args.target.split_once('/') {
        Some((kind, name)) => (kinds::parse_kind(kind)?, name),
        None => (LocalObjectKind::Pod, args.target.as_str()),
    };
    let exists = store
        .object(kind, &common::wire::NamespacedName::new(args.scope.namespace.as_str(), name))?;
    if exists.is_none() {
        return Ok(CommandError::NotFound { resource: kinds::plural(kind), name: name.to_owned() });
    }
    let folder = layout.logs();
    Ok(CommandError::Usage(match &args.container {
        Some(container) => format!("container {container} of {} has written nothing", args.target),
        None => {
            format!("{} has written nothing yet: no log below {}", args.target, folder.display())
        }
    }))
}

impl ContainerLog {
    /// Reads the bytes written since the last call. A file that was replaced is read from its beginning.
    fn read_new(&mut self) -> Result<String, CommandError> {
        let failed = || CommandError::file_error("read", self.path.clone());
        let mut file = match File::open(&self.path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(String::new()),
            file => file.map_err(failed())?,
        };
        let length = file.metadata().map_err(failed())?.len();
        // A shorter file means that the log was rotated since, so this one is new.
        if length < self.printed {
            self.printed = 0;
        }
        file.seek(SeekFrom::Start(self.printed)).map_err(failed())?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed())?;
        self.printed += bytes.len() as u64;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn prefixed(&self, text: &str) -> String {
        if self.prefix.is_empty() {
            return text.to_owned();
        }
        text.lines().map(|line| format!("{}{line}\n", self.prefix)).collect()
    }
}

/// The last `lines` lines of a text; all of it for `None`.
fn last_lines(text: &str, lines: Option<usize>) -> &str {
    let Some(lines) = lines else { return text };
    let body = text.strip_suffix('\n').unwrap_or(text);
    if lines == 0 {
        return "";
    }
    let start = body.rmatch_indices('\n').nth(lines - 1).map_or(0, |(at, _)| at + 1);
    &text[start..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_selects_the_pods_of_its_revisions() {
        let is_selected = |target: &str, pod: &str| pod_filter(target).unwrap()(pod);
        let pod = "hello-00001-deployment-abc12";
        for selector in [pod, "pod/hello-00001-deployment-abc12", "rev/hello-00001", "ksvc/hello"] {
            assert!(is_selected(selector, pod), "{selector}");
        }
        assert!(!is_selected("ksvc/hello", "hello-world-00001-deployment-abc12"));
        assert!(!is_selected("ksvc/hell", pod));
        assert!(pod_filter("nope/hello").is_err());
    }

    #[test]
    fn the_tail_is_whole_lines() {
        let text = "a\nb\nc\n";
        let table =
            [(None, text), (Some(0), ""), (Some(1), "c\n"), (Some(2), "b\nc\n"), (Some(9), text)];
        for (lines, expected) in table {
            assert_eq!(last_lines(text, lines), expected, "{lines:?}");
        }
        assert_eq!(last_lines("a\nb", Some(1)), "b");
    }

    #[test]
    fn a_log_is_printed_once_as_it_grows() {
        let path = std::env::temp_dir().join(format!("rouse-logs-{}.log", std::process::id()));
        fs::write(&path, "one\n").unwrap();
        let mut log = ContainerLog { path: path.clone(), prefix: "[p] ".into(), printed: 0 };
        assert_eq!(log.read_new().unwrap(), "one\n");
        fs::write(&path, "one\ntwo\n").unwrap();
        let text = log.read_new().unwrap();
        assert_eq!(log.prefixed(&text), "[p] two\n");
        fs::write(&path, "new\n").unwrap();
        assert_eq!(log.read_new().unwrap(), "new\n");
        fs::remove_file(path).unwrap();
    }
}
