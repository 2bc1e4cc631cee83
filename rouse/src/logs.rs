//! Shell: `rouse logs`: prints the output of containers, including those of ended pods.

use std::{collections::BTreeSet, fs, path::PathBuf, time::Duration};

use controller::model::{knative::key, object::LocalObjectKind};
use local::{container_log::LogReader, layout::NodeLayout};

use crate::{args::LogsArgs, command_error::CommandError, kinds, stdout, store::NodeStore};

/// Polling interval of `--follow`.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Number of polls after which `--follow` looks for logs of new pods.
const POLLS_PER_SEARCH: u32 = 10;

/// Log of one container.
#[derive(Debug)]
struct ContainerLog {
    reader: LogReader,
    /// Prefix of each line while several logs are printed together.
    prefix: String,
}

/// Prints the logs, and with `--follow` continues as they grow.
pub(crate) fn logs(
    layout: &NodeLayout,
    store: &NodeStore,
    args: &LogsArgs,
) -> Result<(), CommandError> {
    let mut logs = Vec::new();
    find_new_logs(layout, store, args, LogReader::new, &mut logs)?;
    if logs.is_empty() && !args.follow {
        return Err(no_logs_error(layout, store, args)?);
    }
    let is_shared = logs.len() > 1;
    for log in &mut logs {
        let text = log.read_new(args.follow)?;
        stdout::print_text(&log.add_prefix(last_lines(&text, args.tail), is_shared))?;
    }
    if !args.follow {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    runtime.block_on(async {
        for poll in 1.. {
            tokio::time::sleep(POLL_INTERVAL).await;
            // Pods of the service may be created while its logs are followed.
            if poll % POLLS_PER_SEARCH == 0 {
                find_new_logs(layout, store, args, LogReader::from_first_byte, &mut logs)?;
            }
            let is_shared = logs.len() > 1;
            for log in &mut logs {
                let text = log.read_new(true)?;
                stdout::print_text(&log.add_prefix(&text, is_shared))?;
            }
        }
        Ok(())
    })
}

/// Predicate on pod names: true for the pods whose logs are printed.
type PodFilter = Box<dyn Fn(&str) -> bool>;

/// Returns the predicate for the target: a pod's name, or `KIND/NAME`.
fn pod_filter(store: &NodeStore, args: &LogsArgs) -> Result<PodFilter, CommandError> {
    let Some((kind, name)) = args.target.split_once('/') else {
        let name = args.target.clone();
        return Ok(Box::new(move |pod| pod == name));
    };
    let name = name.to_owned();
    let label = match kinds::parse_kind(kind)? {
        LocalObjectKind::Pod => return Ok(Box::new(move |pod| pod == name)),
        // These objects have their Revision's name.
        LocalObjectKind::Revision
        | LocalObjectKind::PodAutoscaler
        | LocalObjectKind::ServerlessService => {
            return Ok(Box::new(move |pod| revision_of_pod(pod) == Some(&name)));
        }
        // The local node makes a Route only for a Service, with its name.
        LocalObjectKind::Service | LocalObjectKind::Route => key::SERVICE,
        LocalObjectKind::Configuration => key::CONFIGURATION,
    };
    let revisions = store.objects(LocalObjectKind::Revision, Some(&args.scope.namespace))?;
    let is_of_target =
        |revision: &&serde_json::Value| revision["metadata"]["labels"][label] == name.as_str();
    let revisions: BTreeSet<String> = revisions
        .iter()
        .filter(is_of_target)
        .filter_map(|it| it["metadata"]["name"].as_str().map(str::to_owned))
        .collect();
    Ok(Box::new(move |pod| {
        revision_of_pod(pod)
            .is_some_and(|it| revisions.contains(it) || is_generated_name(it, &name))
    }))
}

/// Returns true if the Revision has a name that its Configuration generates, such as `hello-00001`. So logs of deleted
/// Revisions are found as well.
fn is_generated_name(revision: &str, configuration: &str) -> bool {
    let suffix = revision.strip_prefix(configuration).and_then(|it| it.strip_prefix('-'));
    // At least five digits: the hundred-thousandth generation has six.
    suffix.is_some_and(|it| it.len() >= 5 && it.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Name of the Revision with which a pod's name begins.
fn revision_of_pod(pod: &str) -> Option<&str> {
    pod.rsplit_once("-deployment-").map(|(revision, _)| revision)
}

/// Adds logs that were created since the last call, each with a reader from `new_reader`.
fn find_new_logs(
    layout: &NodeLayout,
    store: &NodeStore,
    args: &LogsArgs,
    new_reader: fn(PathBuf) -> LogReader,
    logs: &mut Vec<ContainerLog>,
) -> Result<(), CommandError> {
    let is_selected = pod_filter(store, args)?;
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
    // In the order of pods and containers, since a folder lists its files in any order.
    new_logs.sort();
    for (path, prefix) in new_logs {
        if !logs.iter().any(|log| log.reader.path() == path) {
            logs.push(ContainerLog { reader: new_reader(path), prefix });
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
    // A name that does not exist is another mistake than a container that is silent.
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
    /// Reads what was written since the last call. While the file grows, a line that has not ended is left for the next
    /// call, as the container may be in the middle of it.
    fn read_new(&mut self, grows: bool) -> Result<String, CommandError> {
        let bytes = self.reader.read_new(grows);
        let bytes = bytes.map_err(CommandError::file_error("read", self.reader.path()))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Returns the text with the prefix before each line if other logs are printed too.
    fn add_prefix(&self, text: &str, is_shared: bool) -> String {
        if !is_shared {
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
    use crate::{args::NamespaceArgs, store::tests::NodeStoreFixture};

    fn logs_args(target: &str) -> LogsArgs {
        let scope = NamespaceArgs { namespace: "default".into() };
        let target = target.to_owned();
        LogsArgs { target, scope, follow: false, container: None, tail: None }
    }

    #[test]
    fn a_service_selects_the_pods_of_its_revisions() {
        let (folder, store) = NodeStoreFixture::new("logs");
        let named = serde_json::json!({
            "apiVersion": "serving.knative.dev/v1",
            "kind": "Revision",
            "metadata": {"name": "hello-v2", "namespace": "default", "labels": {
                "serving.knative.dev/service": "hello", "serving.knative.dev/configuration": "hello",
            }},
        });
        folder.put_object(LocalObjectKind::Revision, &named);
        let is_selected =
            |target: &str, pod: &str| pod_filter(&store, &logs_args(target)).unwrap()(pod);
        let pod = "hello-00001-deployment-abc12";
        for selector in [pod, "pod/hello-00001-deployment-abc12", "rev/hello-00001", "ksvc/hello"] {
            assert!(is_selected(selector, pod), "{selector}");
        }
        for selector in ["ksvc/hello", "configuration/hello", "route/hello", "rev/hello-v2"] {
            assert!(is_selected(selector, "hello-v2-deployment-abc12"), "{selector}");
        }
        assert!(is_selected("ksvc/hello", "hello-100000-deployment-abc12"));
        assert!(!is_selected("ksvc/hello", "hello-v3-deployment-abc12"));
        assert!(!is_selected("ksvc/hello", "hello-2024-deployment-abc12"));
        assert!(!is_selected("ksvc/hello", "hello-world-00001-deployment-abc12"));
        assert!(!is_selected("ksvc/hell", pod));
        assert!(pod_filter(&store, &logs_args("nope/hello")).is_err());
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
        let mut log = ContainerLog { reader: LogReader::new(path.clone()), prefix: "[p] ".into() };
        assert_eq!(log.read_new(true).unwrap(), "one\n");
        fs::write(&path, "one\ntwo\n").unwrap();
        let text = log.read_new(true).unwrap();
        assert_eq!(log.add_prefix(&text, false), "two\n");
        assert_eq!(log.add_prefix(&text, true), "[p] two\n");
        // The second byte of ü is not there yet.
        fs::write(&path, b"one\ntwo\nthree\nf\xc3").unwrap();
        assert_eq!(log.read_new(true).unwrap(), "three\n");
        fs::write(&path, "one\ntwo\nthree\nfünf").unwrap();
        assert_eq!(log.read_new(true).unwrap(), "");
        assert_eq!(log.read_new(false).unwrap(), "fünf");
        fs::write(&path, "new\n").unwrap();
        assert_eq!(log.read_new(true).unwrap(), "new\n");
        fs::remove_file(path).unwrap();
    }
}
