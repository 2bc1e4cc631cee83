//! Shell: `rouse get`: the controller's objects as tables, YAML, JSON or names.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use common::wire::NamespacedName;
use controller::model::object::LocalObjectKind;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use crate::{
    args::{GetArgs, OutputFormat},
    command_error::CommandError,
    kinds::{self, ObjectSelection},
    stdout,
    store::NodeStore,
    table::TextTable,
    view,
};

/// Polling interval of `--watch`.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Prints the objects that the arguments name, and with `--watch` their changes.
pub(crate) fn get(store: &NodeStore, args: &GetArgs) -> Result<(), CommandError> {
    let targets = kinds::parse_selections(&args.selections)?;
    check_selector(&args.selector)?;
    let objects = find_objects(store, args, &targets)?;
    stdout::print_text(&format_objects(args, &targets, &objects)?)?;
    // To standard error and only with tables, so that scripts read valid YAML, JSON or names.
    if objects.is_empty() && args.output.is_none_or(|format| format == OutputFormat::Wide) {
        let message = match args.all_namespaces {
            true => "No resources found".to_owned(),
            false => format!("No resources found in {} namespace.", args.scope.namespace),
        };
        stdout::print_error(&message);
    }
    if args.watch { watch_changes(store, args, &targets, objects) } else { Ok(()) }
}

/// Objects that the targets name, in the order of the targets.
pub(crate) fn find_objects(
    store: &NodeStore,
    args: &GetArgs,
    targets: &[ObjectSelection],
) -> Result<Vec<(LocalObjectKind, Value)>, CommandError> {
    let namespace = args.scope.namespace.as_str();
    let mut objects = Vec::new();
    for target in targets {
        match &target.name {
            None => {
                let namespace = (!args.all_namespaces).then_some(namespace);
                let candidates = store.objects(target.kind, namespace)?.into_iter();
                objects.extend(
                    candidates
                        .filter(|it| matches_selector(it, &args.selector))
                        .map(|it| (target.kind, it)),
                );
            }
            // As in kubectl: a name means one object, and a selector or all namespaces mean several.
            Some(_) if args.all_namespaces => {
                let reason = "a resource cannot be retrieved by name across all namespaces";
                return Err(CommandError::Usage(reason.to_owned()));
            }
            Some(_) if !args.selector.is_empty() => {
                let reason = "name cannot be provided when a selector is specified";
                return Err(CommandError::Usage(reason.to_owned()));
            }
            Some(name) => {
                objects.push((target.kind, get_object(store, target.kind, namespace, name)?))
            }
        }
    }
    Ok(objects)
}

/// Returns one object, or `NotFound`.
pub(crate) fn get_object(
    store: &NodeStore,
    kind: LocalObjectKind,
    namespace: &str,
    name: &str,
) -> Result<Value, CommandError> {
    let missing =
        || CommandError::NotFound { resource: kinds::plural(kind), name: name.to_owned() };
    store.object(kind, &NamespacedName::new(namespace, name))?.ok_or_else(missing)
}

/// Returns an error for a selector of another form than [`matches_selector`] knows: it would silently select nothing.
fn check_selector(selector: &str) -> Result<(), CommandError> {
    // Letters of keys and values. Kubernetes' set-based requirements have others too: `key in (a, b)`.
    let is_word = |word: &str| {
        word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./".contains(&byte))
    };
    let is_known = |it: &str| match split_requirement(it) {
        Some((key, _, value)) => !key.is_empty() && is_word(key) && is_word(value),
        None => is_word(it.strip_prefix('!').unwrap_or(it).trim()),
    };
    if selector.split(',').all(|requirement| is_known(requirement.trim())) {
        return Ok(());
    }
    let reason =
        format!("unable to parse {selector:?}: a selector is key=value, key!=value, key or !key");
    Err(CommandError::Usage(reason))
}

/// Returns true if an object's labels match a selector: `key=value`, `key==value`, `key!=value`, `key`, `!key`.
fn matches_selector(object: &Value, selector: &str) -> bool {
    let label = |key: &str| object["metadata"]["labels"][key].as_str();
    let is_met = |requirement: &str| match split_requirement(requirement) {
        Some((key, "!=", value)) => label(key) != Some(value),
        Some((key, _, value)) => label(key) == Some(value),
        None => match requirement.strip_prefix('!') {
            Some(key) => label(key.trim()).is_none(),
            None => label(requirement).is_some(),
        },
    };
    selector.split(',').map(str::trim).filter(|it| !it.is_empty()).all(is_met)
}

/// Splits a requirement of a selector into key, operator and value; `None` without an operator.
fn split_requirement(requirement: &str) -> Option<(&str, &str, &str)> {
    // `=` is the last one, because the others contain it.
    ["!=", "==", "="].into_iter().find_map(|operator| {
        let (key, value) = requirement.split_once(operator)?;
        Some((key.trim(), operator, value.trim()))
    })
}

/// Formats the objects in the chosen output.
fn format_objects(
    args: &GetArgs,
    targets: &[ObjectSelection],
    objects: &[(LocalObjectKind, Value)],
) -> Result<String, CommandError> {
    let is_single = matches!(targets, [ObjectSelection { name: Some(_), .. }]);
    let to_document = || match objects {
        // As in kubectl: an object requested by name is printed alone, anything else as a List.
        [(_, object)] if is_single => object.clone(),
        objects => {
            let items: Vec<&Value> = objects.iter().map(|(_, it)| it).collect();
            json!({"apiVersion": "v1", "items": items, "kind": "List", "metadata": {"resourceVersion": ""}})
        }
    };
    let failed =
        |error: String| CommandError::Usage(format!("an object cannot be printed: {error}"));
    match args.output {
        Some(OutputFormat::Yaml) => {
            serde_norway::to_string(&to_document()).map_err(|error| failed(error.to_string()))
        }
        Some(OutputFormat::Json) => {
            let text = serde_json::to_string_pretty(&to_document());
            text.map(|text| text + "\n").map_err(|error| failed(error.to_string()))
        }
        Some(OutputFormat::Name) => {
            let line = |(kind, object): &(LocalObjectKind, Value)| {
                format!(
                    "{}/{}\n",
                    kinds::singular(*kind),
                    view::scalar_text(&object["metadata"]["name"])
                )
            };
            Ok(objects.iter().map(line).collect())
        }
        Some(OutputFormat::Wide) | None => {
            Ok(format_tables(args, objects, !args.no_headers, current_time()))
        }
    }
}

/// Current time of this machine's clock, in whole seconds.
fn current_time() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).unwrap_or_default();
    Timestamp::from_second(seconds).unwrap_or_default()
}

/// Formats one table per kind, with an empty line between two tables.
fn format_tables(
    args: &GetArgs,
    objects: &[(LocalObjectKind, Value)],
    with_header: bool,
    now: Timestamp,
) -> String {
    let is_wide = args.output == Some(OutputFormat::Wide);
    let mut kinds: Vec<LocalObjectKind> = Vec::new();
    for (kind, _) in objects {
        if !kinds.contains(kind) {
            kinds.push(*kind);
        }
    }
    // By the objects and not by the arguments: a kind without objects has no table.
    let has_several_kinds = kinds.len() > 1;
    let table = |kind: &LocalObjectKind| {
        let row = |object: &Value| {
            let mut cells = view::row_cells(*kind, object, is_wide, now);
            // As in kubectl, names carry their kind where several kinds are printed.
            if has_several_kinds {
                cells[0] = format!("{}/{}", crate::kinds::singular(*kind), cells[0]);
            }
            let namespace =
                args.all_namespaces.then(|| view::scalar_text(&object["metadata"]["namespace"]));
            namespace.into_iter().chain(cells).collect()
        };
        let heading = args.all_namespaces.then_some("NAMESPACE");
        let head = heading.into_iter().chain(view::column_names(*kind, is_wide)).map(str::to_owned);
        let header = if with_header { head.collect() } else { Vec::new() };
        let rows = objects
            .iter()
            .filter(|(kind_of_object, _)| kind_of_object == kind)
            .map(|(_, it)| row(it))
            .collect();
        TextTable { header, rows }.to_text()
    };
    kinds.iter().map(table).collect::<Vec<_>>().join("\n")
}

/// Objects that the targets name, without those that are missing: one that is watched by name may be created later, or
/// again.
fn find_existing_objects(
    store: &NodeStore,
    args: &GetArgs,
    targets: &[ObjectSelection],
) -> Result<Vec<(LocalObjectKind, Value)>, CommandError> {
    let mut objects = Vec::new();
    for target in targets {
        match find_objects(store, args, std::slice::from_ref(target)) {
            Err(CommandError::NotFound { .. }) => {}
            found => objects.extend(found?),
        }
    }
    Ok(objects)
}

/// Prints every object that changes, until the process is interrupted.
fn watch_changes(
    store: &NodeStore,
    args: &GetArgs,
    targets: &[ObjectSelection],
    objects: Vec<(LocalObjectKind, Value)>,
) -> Result<(), CommandError> {
    let key = |(kind, object): &(LocalObjectKind, Value)| {
        let meta = &object["metadata"];
        (*kind, view::scalar_text(&meta["namespace"]), view::scalar_text(&meta["name"]))
    };
    let mut previous: BTreeMap<_, _> = objects.iter().map(|it| (key(it), it.1.clone())).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    runtime.block_on(async {
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let now = find_existing_objects(store, args, targets)?;
            let changed: Vec<_> =
                now.iter().filter(|it| previous.get(&key(it)) != Some(&it.1)).cloned().collect();
            for object in &changed {
                let object = std::slice::from_ref(object);
                let text = match args.output {
                    // The header was printed with the first table.
                    Some(OutputFormat::Wide) | None => {
                        format_tables(args, object, false, current_time())
                    }
                    Some(OutputFormat::Yaml) => {
                        format!("---\n{}", format_objects(args, targets, object)?)
                    }
                    Some(OutputFormat::Json | OutputFormat::Name) => {
                        format_objects(args, targets, object)?
                    }
                };
                stdout::print_text(&text)?;
            }
            // Rebuilt, not extended: a deleted object that is created again must be printed.
            previous = now.iter().map(|it| (key(it), it.1.clone())).collect();
        }
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::store::tests::NodeStoreFixture;

    #[derive(clap::Parser)]
    struct GetCliFixture {
        #[command(flatten)]
        get: GetArgs,
    }

    fn args(line: &str) -> GetArgs {
        GetCliFixture::parse_from(line.split(' ')).get
    }

    fn service(namespace: &str, name: &str) -> Value {
        let url = format!("http://{name}.{namespace}.localhost");
        json!({
            "apiVersion": "serving.knative.dev/v1", "kind": "Service",
            "metadata": {"name": name, "namespace": namespace, "labels": {"team": name}},
            "status": {"url": url, "conditions": [{"type": "Ready", "status": "True"}]},
        })
    }

    fn run(store: &NodeStore, line: &str) -> Result<String, CommandError> {
        let args = args(line);
        let targets = kinds::parse_selections(&args.selections)?;
        format_objects(&args, &targets, &find_objects(store, &args, &targets)?)
    }

    #[test]
    fn objects_are_printed_as_kubectl_does() {
        let (temp, store) = NodeStoreFixture::new("get");
        temp.put_object(LocalObjectKind::Service, &service("default", "a"));
        temp.put_object(LocalObjectKind::Service, &service("demo", "b"));
        let head =
            "NAME   URL                          LATESTCREATED   LATESTREADY   READY   REASON\n";
        let row = "a      http://a.default.localhost                                 True\n";
        assert_eq!(run(&store, "get ksvc").unwrap(), format!("{head}{row}"));
        assert!(
            run(&store, "get ksvc a --no-headers").unwrap().starts_with("a   http://a.default")
        );
        let output = run(&store, "get ksvc -A").unwrap();
        assert!(
            output.starts_with("NAMESPACE   NAME") && output.contains("demo        b"),
            "{output}"
        );
        assert_eq!(run(&store, "get ksvc/a -o name").unwrap(), "service.serving.knative.dev/a\n");
        assert!(
            run(&store, "get ksvc a -o yaml")
                .unwrap()
                .starts_with("apiVersion: serving.knative.dev/v1")
        );
        let list: Value = serde_json::from_str(&run(&store, "get ksvc -o json").unwrap()).unwrap();
        assert_eq!((&list["kind"], list["items"].as_array().unwrap().len()), (&json!("List"), 1));
        assert_eq!(run(&store, "get pods").unwrap(), "");
    }

    #[test]
    fn several_kinds_are_several_tables() {
        let (temp, store) = NodeStoreFixture::new("get-all");
        temp.put_object(LocalObjectKind::Service, &service("default", "a"));
        temp.put_object(LocalObjectKind::Route, &service("default", "a"));
        let output = run(&store, "get all --no-headers").unwrap();
        assert!(output.starts_with("service.serving.knative.dev/a "), "{output}");
        assert!(output.contains("\n\nroute.serving.knative.dev/a "), "{output}");
    }

    #[test]
    fn a_missing_object_is_named_with_its_group() {
        let (_temp, store) = NodeStoreFixture::new("get-none");
        let missing = run(&store, "get ksvc nope").unwrap_err().to_string();
        assert_eq!(
            missing,
            "Error from server (NotFound): services.serving.knative.dev \"nope\" not found"
        );
    }

    #[test]
    fn a_selector_that_would_select_nothing_is_refused() {
        for selector in ["", "a=b", "a = b, c != d", "a==b,!c , d", "app.io/x=y"] {
            assert!(check_selector(selector).is_ok(), "{selector}");
        }
        for selector in
            ["team in (a,b)", "team notin (a)", "a=b c", "a b", "a!b", "!a=b", "a=b=c", "=b"]
        {
            let error = check_selector(selector).unwrap_err().to_string();
            assert!(error.contains("unable to parse"), "{error}");
        }
    }

    #[test]
    fn a_watch_of_several_names_continues_while_one_is_missing() {
        let (temp, store) = NodeStoreFixture::new("get-watch");
        temp.put_object(LocalObjectKind::Service, &service("default", "a"));
        let args = args("get ksvc a gone -w");
        let targets = kinds::parse_selections(&args.selections).unwrap();
        let found = find_existing_objects(&store, &args, &targets).unwrap();
        let names: Vec<_> = found.iter().map(|(_, it)| &it["metadata"]["name"]).collect();
        assert_eq!(names, ["a"]);
    }

    #[test]
    fn a_name_is_refused_beside_what_selects_many() {
        let (temp, store) = NodeStoreFixture::new("get-name");
        temp.put_object(LocalObjectKind::Service, &service("default", "a"));
        for (line, reason) in [
            ("get ksvc a -A", "across all namespaces"),
            ("get ksvc a -l team=b", "when a selector is specified"),
        ] {
            let error = run(&store, line).unwrap_err().to_string();
            assert!(error.ends_with(reason), "{error}");
        }
    }

    #[test]
    fn labels_select() {
        let object = service("default", "a");
        for (selector, expected) in [
            ("", true),
            ("team=a", true),
            ("team==a,team", true),
            ("team!=a", false),
            ("!x,team=b", false),
        ] {
            assert_eq!(matches_selector(&object, selector), expected, "{selector}");
        }
    }
}
