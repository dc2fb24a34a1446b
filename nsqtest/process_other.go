//go:build !unix

package nsqtest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
)

func separate(*exec.Cmd) {}

var errNoFreeze = fmt.Errorf("nsqtest: processes can't be frozen here: %w", errors.ErrUnsupported)

func freeze(*os.Process) error { return errNoFreeze }

func thaw(*os.Process) error { return errNoFreeze }
