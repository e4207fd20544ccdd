//! What a file asks for under a key: nothing, `"auto"`, or a value.

/// What a file asks for under a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked<T> {
    /// The key is not in the file, or is null.
    Nothing,
    /// `"auto"`
    Auto,
    /// A value.
    This(T),
}

impl<T> Asked<T> {
    /// The value, if there is one.
    pub fn value(self) -> Option<T> {
        match self {
            Self::This(value) => Some(value),
            Self::Nothing | Self::Auto => None,
        }
    }

    /// Whether it is `"auto"`.
    pub fn is_auto(&self) -> bool {
        matches!(self, Self::Auto)
    }
}
