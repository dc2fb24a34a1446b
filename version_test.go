package nsq

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestVersion(t *testing.T) {
	const userAgent = "app/1 go-nsq/" + VERSION // programs need it to be an untyped string constant
	require.Regexp(t, `/\d+\.\d+\.\d+$`, userAgent)
}
