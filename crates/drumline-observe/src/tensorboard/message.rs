//! The messages of TensorBoard's event files, with the fields that are written here. The numbers are those of its `.proto` files.

use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub(super) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(string, optional, tag = "3")]
    pub(super) file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    pub(super) summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    pub(super) session: Option<Session>,
}

/// The start of a program: what was written before about this step and later ones no longer counts.
#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct Session {
    #[prost(int32, tag = "1")]
    pub(super) status: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(super) values: Vec<Value>,
}

/// A tag, and one of: a number, a histogram, a tensor.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Value {
    #[prost(string, tag = "1")]
    pub(super) tag: String,
    #[prost(float, optional, tag = "2")]
    pub(super) simple_value: Option<f32>,
    #[prost(message, optional, tag = "5")]
    pub(super) histogram: Option<Histogram>,
    #[prost(message, optional, tag = "8")]
    pub(super) tensor: Option<Tensor>,
    #[prost(message, optional, tag = "9")]
    pub(super) metadata: Option<Metadata>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Histogram {
    #[prost(double, tag = "1")]
    pub(super) min: f64,
    #[prost(double, tag = "2")]
    pub(super) max: f64,
    #[prost(double, tag = "3")]
    pub(super) num: f64,
    #[prost(double, tag = "4")]
    pub(super) sum: f64,
    #[prost(double, tag = "5")]
    pub(super) sum_squares: f64,
    /// Where each bucket ends.
    #[prost(double, repeated, tag = "6")]
    pub(super) limits: Vec<f64>,
    /// How many values are in each.
    #[prost(double, repeated, tag = "7")]
    pub(super) counts: Vec<f64>,
}

/// The plugin of TensorBoard that shows a value.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Metadata {
    #[prost(message, optional, tag = "1")]
    pub(super) plugin_data: Option<PluginData>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PluginData {
    #[prost(string, tag = "1")]
    pub(super) plugin_name: String,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) content: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Tensor {
    #[prost(int32, tag = "1")]
    pub(super) dtype: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) shape: Option<Shape>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub(super) strings: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Shape {
    #[prost(message, repeated, tag = "2")]
    pub(super) sizes: Vec<Size>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct Size {
    #[prost(int64, tag = "1")]
    pub(super) size: i64,
}
