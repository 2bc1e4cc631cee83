//! Pure: conversion of a type's JSON schema to a structural schema of Kubernetes.
//!
//! References are resolved, `null` becomes `nullable`, and keywords that a structural schema may not contain are
//! dropped. In a PodSpec, only [fields that users may write](crate::read::parse::field_mask) are kept. The API server
//! keeps other fields nevertheless (`x-kubernetes-preserve-unknown-fields`): the webhook sees them and refuses them
//! with Knative's message, and they do not vanish silently.

use schemars::{JsonSchema, generate::SchemaSettings};
use serde_json::{Map, Value, json};

use crate::read::parse::field_mask::{FieldMask, FieldRule, POD_MASK};

const KEPT_KEYWORDS: [&str; 11] = [
    "description",
    "type",
    "format",
    "enum",
    "minimum",
    "maximum",
    "nullable",
    "pattern",
    "required",
    "x-kubernetes-int-or-string",
    "x-kubernetes-preserve-unknown-fields",
];
const PRESERVE: &str = "x-kubernetes-preserve-unknown-fields";
/// Pattern of a quantity (apimachinery `api/resource`).
const QUANTITY_PATTERN: &str = r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$";

type SchemaObject = Map<String, Value>;

/// Structural schema of the type `T`.
pub(super) fn structural_schema<T: JsonSchema>() -> Value {
    let generator = SchemaSettings::draft2020_12().into_generator();
    let root = Value::from(generator.into_root_schema_for::<T>());
    let defs = root.get("$defs").and_then(Value::as_object).cloned().unwrap_or_default();
    SchemaConverter { definitions: defs }.convert(&root, SchemaPosition::RouseType)
}

/// Position of a schema within an object.
#[derive(Clone, Copy)]
enum SchemaPosition {
    /// Within a type of Rouse.
    RouseType,
    /// Within a PodSpec, with the mask of fields that users may write there; none: all fields.
    PodSpec(Option<&'static FieldMask>),
}

/// Converter with the definitions that references name.
struct SchemaConverter {
    definitions: SchemaObject,
}

impl SchemaConverter {
    /// Converts one schema, with everything below it.
    fn convert(&self, schema: &Value, within: SchemaPosition) -> Value {
        let Some(mut it) = self.resolve_reference(schema) else {
            // The schema `true` permits anything.
            return json!({PRESERVE: true});
        };
        if it.remove("quantity").is_some() {
            return quantity_schema(it.get("description"));
        }
        let mut out = SchemaObject::new();
        // Before the kept keywords are copied: it rewrites `type`, which is one of them.
        simplify_null_type(&mut it);
        for key in KEPT_KEYWORDS {
            if let Some(value) = it.get(key) {
                out.insert(key.into(), value.clone());
            }
        }
        drop_unknown_format(&mut out);
        if let Some(items) = it.get("items") {
            out.insert("items".into(), self.convert(items, within));
        }
        // A structural schema has either `additionalProperties` or `properties`, never both.
        match it.get("additionalProperties") {
            Some(more @ Value::Object(_)) => {
                out.insert("additionalProperties".into(), self.convert(more, within));
            }
            _ => self.convert_properties(&it, &mut out, within),
        }
        Value::Object(out)
    }

    /// Converts the properties of an object, limited to the fields of a pod where it is one.
    fn convert_properties(
        &self,
        schema: &SchemaObject,
        out: &mut SchemaObject,
        within: SchemaPosition,
    ) {
        let Some(Value::Object(all)) = schema.get("properties") else { return };
        // A RevisionSpec flattens its PodSpec, so the fields show where a pod begins.
        let is_pod = all.contains_key("containers") && all.contains_key("restartPolicy");
        let mut properties = SchemaObject::new();
        for (name, field_schema) in all {
            let field = match within {
                SchemaPosition::RouseType if !is_pod => {
                    Some(self.convert(field_schema, SchemaPosition::RouseType))
                }
                SchemaPosition::RouseType => match POD_MASK.rule_of(name) {
                    Some(field) => Some(self.convert_field(field_schema, field)),
                    // A limit of Knative, such as `containerConcurrency`, stands among the pod's fields.
                    None => is_revision_limit(name)
                        .then(|| self.convert(field_schema, SchemaPosition::RouseType)),
                },
                SchemaPosition::PodSpec(None) => Some(self.convert(field_schema, within)),
                SchemaPosition::PodSpec(Some(mask)) => {
                    mask.rule_of(name).map(|field| self.convert_field(field_schema, field))
                }
            };
            properties.extend(field.map(|field| (name.clone(), field)));
        }
        out.insert("properties".into(), Value::Object(properties));
        if is_pod || matches!(within, SchemaPosition::PodSpec(_)) {
            out.insert(PRESERVE.into(), true.into());
            // The webhook reports missing fields, with Knative's message.
            out.remove("required");
        }
    }

    /// Converts one field of a pod, as the mask states.
    fn convert_field(&self, schema: &Value, field: FieldRule) -> Value {
        match field {
            FieldRule::Any => self.convert(schema, SchemaPosition::PodSpec(None)),
            FieldRule::In(mask) => self.convert(schema, SchemaPosition::PodSpec(Some(mask))),
            FieldRule::If(feature) | FieldRule::IfIn(feature, _) => {
                self.feature_field(schema, feature.key)
            }
        }
    }

    /// Schema of a field behind a feature: open below the field itself, as in Knative's schemas.
    fn feature_field(&self, schema: &Value, feature: &str) -> Value {
        let about = format!("Needs the feature {feature} of config-features.");
        let it = self.resolve_reference(schema).unwrap_or_default();
        match it.get("type").and_then(Value::as_str) {
            Some("array") => json!({
                "type": "array",
                "description": about,
                "items": {"type": "object", PRESERVE: true},
            }),
            Some("object") | None => {
                json!({"type": "object", "description": about, PRESERVE: true})
            }
            Some(scalar) => json!({"type": scalar, "description": about}),
        }
    }

    /// Replaces a reference by its definition; keywords beside the reference take precedence.
    fn resolve_reference(&self, schema: &Value) -> Option<SchemaObject> {
        let mut it = schema.as_object()?.clone();
        for wrapper in ["allOf", "anyOf", "oneOf"] {
            let Some(Value::Array(all)) = it.remove(wrapper) else { continue };
            let is_null = |it: &Value| it.get("type").and_then(Value::as_str) == Some("null");
            // schemars writes `Option<T>` as `anyOf` of `T` and `null`.
            let mut rest: Vec<&Value> = all.iter().filter(|one| !is_null(one)).collect();
            if rest.len() < all.len() {
                it.insert("nullable".into(), true.into());
            }
            if let [only] = rest[..] {
                self.merge_missing(&mut it, only);
            } else if rest.iter().all(|one| one.get("const").is_some() || one.get("enum").is_some())
            {
                merge_enum_variants(&mut it, &mut rest);
            }
        }
        if let Some(name) = it.remove("$ref") {
            let name = name.as_str().unwrap_or_default().trim_start_matches("#/$defs/").to_owned();
            // The definition is a plain string, so the type is recognized by its name.
            if name.ends_with(".Quantity") {
                it.insert("quantity".into(), true.into());
            } else if let Some(definition) = self.definitions.get(&name) {
                self.merge_missing(&mut it, definition);
            }
        }
        Some(it)
    }

    /// Adds the keywords of `other` that `schema` does not have.
    fn merge_missing(&self, schema: &mut SchemaObject, other: &Value) {
        for (key, value) in self.resolve_reference(other).unwrap_or_default() {
            schema.entry(key).or_insert(value);
        }
    }
}

/// Merges an enum whose variants have descriptions of their own.
fn merge_enum_variants(schema: &mut SchemaObject, all: &mut Vec<&Value>) {
    let mut values = Vec::new();
    for one in all.drain(..) {
        values.extend(one.get("const").cloned());
        values.extend(one.get("enum").and_then(Value::as_array).into_iter().flatten().cloned());
    }
    schema.insert("type".into(), "string".into());
    schema.insert("enum".into(), values.into());
}

/// Replaces the type list `[X, "null"]` by `X` and `nullable`.
fn simplify_null_type(schema: &mut SchemaObject) {
    let Some(Value::Array(types)) = schema.get("type") else { return };
    let kept: Vec<Value> = types.iter().filter(|one| *one != "null").cloned().collect();
    if kept.len() < types.len() {
        schema.insert("nullable".into(), true.into());
    }
    if let [only] = &kept[..] {
        let only = only.clone();
        schema.insert("type".into(), only);
    }
}

/// Drops number formats that Kubernetes does not have: only two sizes of signed integers exist.
fn drop_unknown_format(schema: &mut SchemaObject) {
    let format = schema.get("format").and_then(Value::as_str).unwrap_or_default();
    if !matches!(format, "" | "int32" | "int64" | "double" | "date-time" | "byte") {
        schema.remove("format");
    }
}

fn quantity_schema(about: Option<&Value>) -> Value {
    let mut out = json!({
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "pattern": QUANTITY_PATTERN,
        "x-kubernetes-int-or-string": true,
    });
    if let Some(about) = about {
        out["description"] = about.clone();
    }
    out
}

fn is_revision_limit(name: &str) -> bool {
    name == "containerConcurrency" || name.ends_with("imeoutSeconds")
}
