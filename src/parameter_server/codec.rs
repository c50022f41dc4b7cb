//! Encodes and decodes numbers in message bodies.

use std::borrow::Cow;

use half::bf16;
use half::slice::HalfFloatSliceExt as _;

use hpctrain_base::error::{Error, Result};
use hpctrain_config::MessageDtype;

/// Appends numbers to a body in the given format.
pub fn encode(format: MessageDtype, values: &[f32], body: &mut Vec<u8>) {
    match format {
        MessageDtype::F32 => body.extend_from_slice(bytemuck::cast_slice(values)),
        MessageDtype::Bf16 => {
            let mut narrow = vec![bf16::ZERO; values.len()];
            narrow.convert_from_f32_slice(values);
            narrow.iter().for_each(|value| body.extend_from_slice(&value.to_le_bytes()));
        }
    }
}

/// Returns the size of a number in bytes.
pub fn width(format: MessageDtype) -> usize {
    match format {
        MessageDtype::F32 => size_of::<f32>(),
        MessageDtype::Bf16 => size_of::<bf16>(),
    }
}

/// Checks that a body of `bytes` bytes has `elements` numbers.
///
/// # Errors
/// Returns an error if it has another length.
pub fn check_len(format: MessageDtype, bytes: usize, elements: usize) -> Result<()> {
    if bytes == elements * width(format) {
        return Ok(());
    }
    Err(Error::comm(format!("expected a body of {elements} numbers, received {bytes} bytes")))
}

/// Decodes the numbers of a body.
///
/// # Errors
/// Returns an error if the body does not have the length of `elements` numbers.
pub fn decode(format: MessageDtype, body: &[u8], elements: usize) -> Result<Cow<'_, [f32]>> {
    check_len(format, body.len(), elements)?;
    Ok(match format {
        // The body is usually aligned; otherwise the values are copied.
        MessageDtype::F32 => match bytemuck::try_cast_slice(body) {
            Ok(values) => Cow::Borrowed(values),
            Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(body)),
        },
        MessageDtype::Bf16 => {
            let narrow = body.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes));
            Cow::Owned(narrow.map(bf16::to_f32).collect())
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_arrive() {
        let values = [1.5f32, -0.0, 3.0e-39, f32::INFINITY];
        let mut body = vec![];
        encode(MessageDtype::F32, &values, &mut body);
        assert_eq!(decode(MessageDtype::F32, &body, 4).unwrap(), &values[..]);
        assert!(decode(MessageDtype::F32, &body, 5).is_err());
        body.clear();
        encode(MessageDtype::Bf16, &[1.0, 1.001], &mut body);
        assert_eq!(
            (body.len(), &decode(MessageDtype::Bf16, &body, 2).unwrap()[..]),
            (4, &[1.0f32, 1.0][..])
        );
    }
}
